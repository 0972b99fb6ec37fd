"""`python -m perf.load.soak.table FILE.json`: the outcome of a soak as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from perf.command import run
from tools import markdown as tables

_NAMES = {"rss_mib": "resident", "anonymous_mib": "private", "fds": "descriptors", "threads": "threads"}


def markdown(outcome: dict[str, Any]) -> str:
    """What was sent, and every process's measures in the first and the last third."""
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(outcome["requests"].items()))
    found = "; ".join(outcome["failures"]) or "nothing to report"
    text = (
        f"{outcome['seconds']:.0f} s with {outcome['in_flight']} requests in flight: {reasons}; "
        f"{outcome['tokens']:,} tokens ({outcome['tokens_per_second']:,} per second); the longest response took "
        f"{outcome['longest_response_s']:.2f} s. Found: {found}."
    )
    columns = ("process", "measure", "first third", "last third", "growth")
    return f"{text}\n\n{tables.markdown(columns, map(_cells, outcome['growth']))}"


def _cells(row: dict[str, Any]) -> list[str]:
    unit = " MiB" if row["measure"].endswith("_mib") else ""
    first, last = (f"{row[key]:.1f}{unit}" for key in ("first", "last"))
    return [row["process"], _NAMES[row["measure"]], first, last, f"{row['relative']:+.2%}"]


def main(path: Annotated[Path, typer.Argument(help="What perf.load.soak --json wrote.")]) -> None:
    print(markdown(json.loads(path.read_text())))


if __name__ == "__main__":
    run(main)
