"""Exact tokens per second of every strategy without any overhead, by the Markov models: what there is to gain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from perf.baselines.limits import no_wait
from perf.baselines.turns import RULES
from perf.compare.cells import MODEL_SYNC, OURS
from perf.compare.thresholds import Tuning
from perf.compare.workloads import Reference
from perf.rows import markdown_of

_SYSTEMS = (*RULES, MODEL_SYNC, "eager", OURS)
_NOBODY = "nobody ever waits"


def rows(
    reference: Reference, tuning: Tuning, policies: Sequence[str], in_flight: Sequence[int]
) -> Iterator[dict[str, str]]:
    """Policy, number in flight, and a rate per strategy; step times do not depend on prompts here."""
    for policy in policies:
        profile = reference.profile(policy, prefill=False)
        for n in in_flight:
            rates = {system: tuning.rate(system, policy, profile, n) for system in _SYSTEMS}
            rates[_NOBODY] = no_wait(profile, n)
            yield {"policy": policy, "in_flight": str(n), **{name: f"{rate:.2f}" for name, rate in rates.items()}}


def markdown(found: Sequence[Mapping[str, str]]) -> str:
    """As a Markdown table; in brackets ours over that strategy."""
    return markdown_of([{"policy": row["policy"], "in flight": row["in_flight"], **_shown(row)} for row in found])


def _shown(row: Mapping[str, str]) -> dict[str, str]:
    rates = {name: float(row[name]) for name in (*_SYSTEMS, _NOBODY)}
    ratios = {name: "" if name == OURS else f" ({rates[OURS] / rate:.2f})" for name, rate in rates.items()}
    return {name: f"{rate:.1f}{ratios[name]}" for name, rate in rates.items()}
