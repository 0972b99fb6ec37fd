"""What a window of metrics says about a deployment, and the profile's YAML text with the evidence beside it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from itertools import pairwise

from tokenrouter.metrics_page import Scrape
from tokenrouter.yaml_files import parse_yaml
from tools.dtmc.errors import ProfileError
from tools.profile.routes import Row, entry_model, read_rows
from tools.profile.steps import StepFit, fit, read_sums

TICKS_PER_STEP = 20
"""About so many time quanta in the shortest step: rounding costs at most 2.5 % of it."""


@dataclass(frozen=True)
class Measured:
    """A profile with its evidence; dicts are by model, fastest first.

    Attributes:
        source: what was observed, for the header.
        entry: where most responses began.
        started: responses that began at each model.
        handoff_ms: mean time of a hand-off to an idle model; 0 without one.
    """

    source: str
    steps: dict[str, StepFit]
    rows: dict[str, Row]
    max_batch: dict[str, int]
    entry: str
    started: dict[str, float]
    handoff_ms: float
    handoffs: float

    @property
    def delta_ms(self) -> float:
        """Time quantum: the shortest step over `TICKS_PER_STEP`, one digit; not so long that a hand-off vanishes."""
        shortest = min(time for steps in self.steps.values() for time in steps.step_ms.values())
        quantum = shortest / TICKS_PER_STEP
        digit = 10.0 ** math.floor(math.log10(quantum))
        return round(max(digit, math.floor(quantum / digit) * digit), 9)


def evaluate(before: Scrape, after: Scrape, source: str) -> Measured:
    """Reads what happened between two scrapes.

    Raises:
        ProfileError: there was no traffic, or too little to know where requests go.
    """
    delta = after.since(before)
    active = [m for m in delta.labels("tokenrouter_steps", "model") if delta.value("tokenrouter_steps", model=m) > 0]
    fits = {model: fit(sums) for model in active if (sums := read_sums(delta, model)).groups}
    if not fits:
        raise ProfileError(f"{source}: no model made a step; send requests meanwhile, or let --load do it")
    names = sorted(fits, key=lambda model: min(fits[model].step_ms.values()))
    entry, started = entry_model(delta, names)
    rows = read_rows(delta, names, entry)
    if silent := [name for name in names if not rows[name].total]:
        raise ProfileError(f"{source}: {silent[0]} made steps, but no request went on from there; observe for longer")
    handoffs = sum(delta.value("tokenrouter_handoff_seconds_count", model=name) for name in names)
    seconds = sum(delta.value("tokenrouter_handoff_seconds_sum", model=name) for name in names)
    return Measured(
        source=source,
        steps={name: fits[name] for name in names},
        rows=rows,
        max_batch={name: round(after.value("tokenrouter_max_batch", model=name)) for name in names},
        entry=entry,
        started=started,
        handoff_ms=1e3 * seconds / handoffs if handoffs else 0.0,
        handoffs=handoffs,
    )


def to_yaml(measured: Measured) -> str:
    """The profile as YAML, with comments; `tools.dtmc.profile` reads it."""
    lines = [f"# Measured: {measured.source}.", f"delta_ms: {measured.delta_ms:g}", "models:"]
    for name, steps in measured.steps.items():
        lines += [f"  {_key(name)}:", *_step_lines(steps), f"    max_batch: {measured.max_batch[name]}"]
    total = sum(measured.started.values())
    lines.append(f"entry: {_key(measured.entry)}  # {measured.started[measured.entry]:.0f} of {total:.0f} responses")
    lines.append("routing:  # the end of a response counts as a move to the entry: another one starts")
    for name, row in measured.rows.items():
        lines.append(f"  {_key(name)}: {_mapping(row.probabilities())}  # {row.total:.0f} moves")
    lines.append("commit:")
    for name, row in measured.rows.items():
        lines.append(f"  {_key(name)}: {_mapping(row.commits())}")
    lines.append(_handoff_line(measured))
    return "\n".join(lines) + "\n"


def _step_lines(steps: StepFit) -> list[str]:
    lines = ["    step_ms:"]
    lines += [f"      {batch}: {time:.4g}  # {steps.steps[batch]} steps" for batch, time in steps.step_ms.items()]
    if steps.left_out:
        few = ", ".join(f"{batch} ({count})" for batch, count in steps.left_out.items())
        lines.append(f"      # left out, too few steps: {few}")
    falls = [f"{a} to {b}" for (a, left), (b, right) in pairwise(steps.step_ms.items()) if right < 0.9 * left]
    if falls:
        lines.append(
            f"      # falls by more than 10 % from {', '.join(falls)}: was the machine busy with other things?"
        )
    evidence = f"from {steps.extended_tokens} extended tokens"
    if not math.isnan(steps.slope_error_ms):
        evidence += f", standard error {steps.slope_error_ms:.2g}"
    return [*lines, f"    extend_ms_per_token: {steps.extend_ms_per_token:.4g}  # {evidence}"]


def _handoff_line(measured: Measured) -> str:
    """Below half of the quantum a hand-off cannot be represented, above the shortest step it is not allowed."""
    time = measured.handoff_ms
    evidence = f"mean of {measured.handoffs:.0f} hand-offs to a model that was idle"
    shortest = min(time for steps in measured.steps.values() for time in steps.step_ms.values())
    if time and time < 0.55 * measured.delta_ms:
        return f"handoff_ms: 0  # {time:.3g}, below the quantum; {evidence}"
    if time > shortest:
        return f"handoff_ms: {shortest:.3g}  # {time:.3g}, but the Markov model allows no more than a step; {evidence}"
    return f"handoff_ms: {time:.3g}  # {evidence}"


def _mapping(values: dict[str, float]) -> str:
    return "{" + ", ".join(f"{_key(name)}: {value:.6g}" for name, value in values.items()) + "}"


def _key(name: str) -> str:
    """A model's name as a YAML key, quoted if it would mean something else."""
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", name) and parse_yaml(name) == name
    return name if plain else json.dumps(name)
