"""`python -m perf.chaos.table FILE.json`: what `perf.chaos --json` printed, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from perf.chaos.outcome import RECOVERY_S
from perf.command import run
from tools import markdown as tables

_VERDICTS = ("right", "wrong", "hung", "failed_clearly", "failed_beside_no_death")


def markdown(facts: dict[str, Any]) -> str:
    """Verdicts in a sentence, and a row for every kind of event."""
    verdicts = ", ".join(f"{facts[name]:,} {name.replace('_', ' ')}" for name in _VERDICTS)
    attacks, pauses = facts["stall_seconds_beside_attacks"], facts["stall_seconds_in_pauses"]
    text = (
        f"{facts['seconds']:.0f} s with {facts['in_flight']} requests in flight, seed {facts['seed']}: "
        f"{facts['requests']:,} requests, {verdicts}. The longest gap of a stream that was probed, per event and per "
        f"pause: {_stall(attacks)} beside malformed and oversized requests, {_stall(pauses)} beside none."
    )
    rows = [_cells(kind, number, facts["recovery_seconds"].get(kind, {})) for kind, number in facts["events"].items()]
    return f"{text}\n\n{tables.markdown(('event', 'times', 'right again after, p50', 'max', 'bound'), rows)}"


def _stall(spread: dict[str, float]) -> str:
    return f"p50 {spread['p50']:.3f} s, longest {spread['max']:.3f} s" if "p50" in spread else "not seen"


def _cells(kind: str, number: int, spread: dict[str, float]) -> list[str]:
    bound = f"{RECOVERY_S[kind]:g} s" if kind in RECOVERY_S else "-"
    back = [f"{spread[name]:.1f} s" if name in spread else "-" for name in ("p50", "max")]
    return [kind, str(number), *back, bound]


def main(path: Annotated[Path, typer.Argument(help="What perf.chaos --json printed.")]) -> None:
    print(markdown(json.loads(path.read_text())))


if __name__ == "__main__":
    run(main)
