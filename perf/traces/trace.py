"""Traces: who wrote each token of a response. Recorded from any deployment, replayed by the policy `scripted`.

One JSON object per line and response. `runs` are [model, tokens] in order, as the server's `routing` output gives them;
`policy` decides how a model learns that another one writes, so that a replay makes the same visits:

    {"policy": "r2r", "runs": [["small", 12], ["large", 1], ["small", 3]], "handoffs": 2, "discards": 1, "agreed": 1}

Runs do not show a visit that ended only to begin anew before any other model wrote. R2R, CITER, Co-LLM and `random`
visit for one token each, so nothing is lost; in a replay of R-Stitch such visits are one longer visit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import Profile

_HANDOFFS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("r2r", "citer", "collm", "random"), {"trigger": "first", "visit_tokens": 1}),
    (("rstitch", "glimprouter"), {"trigger": "first"}),
    (("me", "single", "query_level"), {"trigger": "keep"}),
)
_TRIGGERS = {policy: knobs for policies, knobs in _HANDOFFS for policy in policies}


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One response.

    Attributes:
        policy: that routed it.
        runs: (model, tokens) in order.
        handoffs: as the server counted them.
        emulated: the tokens do not come from real models.
        prompt: for reference.
        discards: hand-offs at which the small model's token was discarded; `agreed`: where the large one wrote it too.
    """

    policy: str
    runs: tuple[tuple[str, int], ...]
    handoffs: int = 0
    emulated: bool = False
    prompt: str = ""
    discards: int = 0
    agreed: int = 0

    def __post_init__(self) -> None:
        """Refuses empty traces and runs, and policies whose hand-offs `scripted` cannot make."""
        if self.policy not in _TRIGGERS:
            raise ValueError(f"policy is {self.policy!r}; traces of {', '.join(sorted(_TRIGGERS))} can be replayed")
        if not self.runs or min(tokens for _, tokens in self.runs) < 1:
            raise ValueError("runs is empty, or a run has no token")

    @property
    def writers(self) -> list[str]:
        """Model of each token."""
        return [model for model, tokens in self.runs for _ in range(tokens)]

    def script(self) -> dict[str, Any]:
        """Parameters of the policy `scripted` that replay this trace, over and over."""
        return {"writers": self.writers, **_TRIGGERS[self.policy]}


def read_traces(path: Path) -> list[Trace]:
    """All traces of a file.

    Raises:
        ProfileError: names file, line and field.
    """
    traces = []
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ProfileError(f"{path}: {exc}") from exc
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                traces.append(msgspec.json.decode(line, type=Trace))
        except msgspec.MsgspecError as exc:
            raise ProfileError(f"{path}:{number}: {exc}") from exc
    if not traces:
        raise ProfileError(f"{path}: no trace in it; record some with python -m perf.traces")
    return traces


def write_traces(traces: Iterable[Trace], path: Path) -> None:
    """Writes the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(msgspec.json.encode(trace).decode() + "\n" for trace in traces), "utf-8")


def from_routing(routing: dict[str, Any], prompt: str = "") -> Trace:
    """The trace in the `routing` of a whole response, or of its last chunk if `runs` has those of all chunks."""
    runs: list[tuple[str, int]] = []
    for run in routing["runs"]:
        tokens = run["end"] - run["start"]
        if runs and runs[-1][0] == run["model"]:
            runs[-1] = (run["model"], runs[-1][1] + tokens)
        else:
            runs.append((run["model"], tokens))
    return Trace(
        policy=routing["policy"],
        runs=tuple(runs),
        handoffs=routing["handoffs"],
        discards=routing.get("discards", 0),
        agreed=routing.get("agreed", 0),
        emulated=bool(routing.get("emulated")),
        prompt=prompt,
    )


def agreement(traces: Iterable[Trace]) -> float | None:
    """Share of the discarded tokens that the large model wrote too; None if none was compared."""
    known = list(traces)
    compared = sum(trace.discards for trace in known)
    return sum(trace.agreed for trace in known) / compared if compared else None


def moves(trace: Trace, first: str) -> Counter[tuple[str, str, bool]]:
    """(from, to, committed) of every step of a replay of the whole trace, over and over.

    Args:
        trace: the trace.
        first: the deployment's first model.
    """
    counts: Counter[tuple[str, str, bool]] = Counter()
    script, writers = trace.script(), trace.writers
    if script["trigger"] == "keep":
        counts.update((writer, following, True) for writer, following in _around(writers))
        return counts
    limited = script.get("visit_tokens") == 1
    for writer, following in _around(writers):
        if writer == first:
            counts[first, first, True] += 1
            if following != first:
                counts[first, following, False] += 1
            continue
        back = limited or following == first
        counts[writer, first if back else following, True] += 1
        if back and following != first:
            counts[first, following, False] += 1
    return counts


def traced(profile: Profile, traces: Sequence[Trace]) -> Profile:
    """The profile with the mean routing of traces. Their runs need not be geometric, as the Markov model assumes.

    Raises:
        ProfileError: a trace names a model that the profile does not have.
    """
    names, counts = profile.names, Counter[tuple[str, str, bool]]()
    for trace in traces:
        if unknown := sorted({model for model, _ in trace.runs} - set(names)):
            raise ProfileError(f"the trace names {unknown[0]!r}; the profile's models are {', '.join(names)}")
        counts.update(moves(trace, names[0]))
    routing, commit = {}, {}
    for source in names:
        to = {target: counts[source, target, False] + counts[source, target, True] for target in names}
        total = sum(to.values())
        routing[source] = {t: n / total for t, n in to.items()} if total else {names[0]: 1.0}
        commit[source] = {t: counts[source, t, True] / n if n else 1.0 for t, n in to.items()}
    return msgspec.structs.replace(profile, routing=routing, commit=commit, entry=names[0])


def scripts(traces: Sequence[Trace]) -> tuple[str, ...]:
    """`policy_params` by trace."""
    return tuple(json.dumps(trace.script()) for trace in traces)


def _around(writers: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Each writer with the following one; the first one follows the last."""
    return zip(writers, [*writers[1:], writers[0]], strict=True)
