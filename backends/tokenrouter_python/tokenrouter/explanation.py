"""Decisions of a response as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def table(decisions: Iterable[Mapping[str, Any]]) -> Table:
    """One row per decision.

    Args:
        decisions: of a response's `routing`.
    """
    rows = Table("position", "token", "at", "goes on at", "because", box=None, pad_edge=False, header_style="bold")
    for decision in decisions:
        moves = decision["target"] != decision["model"]
        first = decision["why"] == "entry"
        token = "" if first else repr(decision["text"])
        what = [decision["target"], "" if first or decision["kept"] else " (token discarded)"]
        cells = [str(decision["position"]), token, decision["model"], "".join(what), _because(decision)]
        # As text, never as markup: names come from a server.
        rows.add_row(*map(Text, cells), style="bold" if moves and not first else "")
    return rows


def _because(decision: Mapping[str, Any]) -> str:
    """Every measure beside its threshold; the reason where there is none."""
    measures = [_measure(**measure) for measure in decision["measures"]]
    if not measures:
        return str(decision["why"])
    return ", ".join(measures)


def _measure(name: str, value: float, relation: str, threshold: float) -> str:
    holds = {"<": value < threshold, "<=": value <= threshold, ">": value > threshold, ">=": value >= threshold}
    shown = relation if holds[relation] else {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[relation]
    return f"{name} {value:.4g} {shown} {threshold:.4g}"
