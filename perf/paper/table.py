"""Rows of the comparison: the file, the tables, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from perf.paper.cells import BARRIER, BEST, EAGER, SECTIONS, Cell
from perf.paper.reference import Paper
from perf.rows import Row, shown, write_rows

Text = dict[str, str]
"""A row of the file."""


def row_of(cell: Cell, found: Row, seconds: float) -> Text:
    """From a row of `perf.serving`. Relative errors are fractions."""
    theory, rate = cell.theory(), found["tokens_per_second"]
    handoffs = [ms for name, ms in found.items() if name.startswith("mean_handoff_ms.") and ms == ms]
    around = [ms for name, ms in found.items() if name.startswith("around_ms.")]
    return {
        "kind": "emulated",
        "section": cell.section,
        "system": cell.system,
        "policy": cell.policy,
        "in_flight": str(cell.in_flight),
        "thresholds": " ".join(map(str, cell.thresholds)) or "-",
        "paper_theory": _text(cell.paper_theory, ""),
        "theory": f"{theory:.2f}",
        "paper_measured": _text(cell.paper_measured, ""),
        "measured": f"{rate:.2f}",
        "spread": f"{found['spread']:.4f}" if found.get("windows", 1) > 1 else "",
        "measured_over_theory": _error(rate, theory),
        "measured_over_as_drawn": _text(found.get("difference_as_drawn"), ".4f"),
        "theory_over_paper_theory": _error(theory, cell.paper_theory),
        "measured_over_paper_measured": _error(rate, cell.paper_measured),
        "handoff_ms": f"{fmean(handoffs):.3f}" if handoffs else "",
        "around_ms": f"{fmean(around):.3f}",
        "seconds": f"{seconds:g}",
    }


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _error(value: float, of: float | None) -> str:
    return "" if of is None else f"{value / of - 1.0:.4f}"


def write(path: Path, rows: Iterable[Text]) -> None:
    """Writes the file, in the order of the sections."""
    order = list(SECTIONS)
    write_rows(path, sorted(rows, key=lambda row: order.index(row["section"])))


_SHOWN = {
    "in flight": ("in_flight", ""),
    "system": ("system", ""),
    "thresholds": ("thresholds", ""),
    "paper: theory": ("paper_theory", ""),
    "our theory": ("theory", ".1f"),
    "error": ("theory_over_paper_theory", "+.1%"),
    "paper: measured": ("paper_measured", ""),
    "emulated": ("measured", ".1f"),
    "to paper's": ("measured_over_paper_measured", "+.1%"),
    "to our theory": ("measured_over_theory", "+.1%"),
    "to theory as drawn": ("measured_over_as_drawn", "+.1%"),
}


def figures(rows: Iterable[Text]) -> list[dict[str, str]]:
    """What is shown of a section, by heading."""
    texts = (shown(row, _SHOWN) for row in rows)
    return [{heading: "0.0%" if text in ("-0.0%", "+0.0%") else text for heading, text in row.items()} for row in texts]


def effects(rows: Sequence[Text], paper: Paper) -> list[dict[str, str]]:
    """What is shown of `gains`, by heading."""
    return [
        {
            "effect": what,
            **{
                heading: "-" if value is None else f"{value:.2f} {unit}"
                for heading, value in zip(("paper", "our theory", "emulated"), values, strict=True)
            },
        }
        for what, unit, *values in gains(rows, paper)
    ]


def gains(rows: Sequence[Text], paper: Paper) -> list[tuple[str, str, float | None, float, float]]:
    """What follows: (what, unit, paper, our theory, emulated), for what was measured."""
    found: list[tuple[str, str, float | None, float, float]] = []
    numbers = sorted({int(row["in_flight"]) for row in rows if row["section"] == "table_6"})
    for n in numbers:
        for name, upper, lower in (("delay", BEST, EAGER), ("asynchronous execution", EAGER, BARRIER)):
            above, below = (_row(rows, "table_6", system, n) for system in (upper, lower))
            if above and below:
                found.append((f"{name}, {n} in flight", "x", *_gain(above, below)))
    one, many = _row(rows, "scaling", BEST, 1), _row(rows, "scaling", BEST, 16)
    if one and many:
        _, theory, measured = _gain(many, one)
        published = paper.facts["scaling_throughput"].value
        found.append(("throughput, 16 over 1 in flight", "x", published, theory, measured))
        published = paper.facts["scaling_user_speed"].value
        speeds = (100 * theory / 16, 100 * measured / 16)
        found.append(("speed of one user at 16, of that at 1", "%", published, *speeds))
    return found


def _row(rows: Sequence[Text], section: str, system: str, in_flight: int) -> Text | None:
    for row in rows:
        if (row["section"], row["system"], row["in_flight"]) == (section, system, str(in_flight)):
            return row
    return None


def _gain(above: Text, below: Text) -> tuple[float | None, float, float]:
    published = [row["paper_measured"] for row in (above, below)]
    paper = float(published[0]) / float(published[1]) if all(published) else None
    return paper, float(above["theory"]) / float(below["theory"]), float(above["measured"]) / float(below["measured"])
