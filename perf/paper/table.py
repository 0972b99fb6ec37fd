"""Rows of the comparison: the file, the tables, and what follows from them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from perf.paper.cells import BARRIER, BEST, EAGER, SECTIONS, Cell
from perf.paper.measure import Measured
from perf.paper.reference import Paper

Row = dict[str, str]
COLUMNS = (
    "kind", "section", "system", "policy", "in_flight", "thresholds", "paper_theory", "theory", "paper_measured",
    "measured", "spread", "measured_over_theory", "measured_over_as_drawn", "theory_over_paper_theory",
    "measured_over_paper_measured", "handoff_ms", "around_ms", "seconds",
)  # fmt: skip


def row_of(cell: Cell, measured: Measured, seconds: float) -> Row:
    """A row of the file. Relative errors are fractions."""
    theory, rate = cell.theory(), measured.tokens_per_second
    values: dict[str, object] = {
        "kind": "emulated",
        "section": cell.section,
        "system": cell.system,
        "policy": cell.policy,
        "in_flight": cell.in_flight,
        "thresholds": " ".join(map(str, cell.thresholds)) or "-",
        "paper_theory": cell.paper_theory,
        "theory": f"{theory:.2f}",
        "paper_measured": cell.paper_measured,
        "measured": f"{rate:.2f}",
        "spread": _ratio(measured.spread, 1.0, 0.0),
        "measured_over_theory": _ratio(rate, theory),
        "measured_over_as_drawn": _ratio(rate, measured.as_drawn),
        "theory_over_paper_theory": _ratio(theory, cell.paper_theory),
        "measured_over_paper_measured": _ratio(rate, cell.paper_measured),
        "handoff_ms": "" if measured.handoff_ms is None else f"{measured.handoff_ms:.3f}",
        "around_ms": f"{measured.around_ms:.3f}",
        "seconds": f"{seconds:g}",
    }
    return {name: "" if values[name] is None else str(values[name]) for name in COLUMNS}


def _ratio(value: float | None, of: float | None, minus: float = 1.0) -> str:
    return "" if value is None or of is None else f"{value / of - minus:.4f}"


def read(path: Path) -> list[Row]:
    """Rows of the file; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes the file, in the order of the sections."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = list(SECTIONS)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: order.index(row["section"])))


_SHOWN = (
    ("in flight", "in_flight", ""), ("system", "system", ""), ("thresholds", "thresholds", ""),
    ("paper: theory", "paper_theory", ""), ("our theory", "theory", "number"),
    ("error", "theory_over_paper_theory", "%"),
    ("paper: measured", "paper_measured", ""), ("emulated", "measured", "number"),
    ("to paper's", "measured_over_paper_measured", "%"), ("to our theory", "measured_over_theory", "%"),
    ("to theory as drawn", "measured_over_as_drawn", "%"),
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    return [_shown(row[column], style) for _, column, style in _SHOWN]


def _shown(text: str, style: str) -> str:
    if not text:
        return "-"
    if style == "%":
        return f"{float(text):+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%")
    return f"{float(text):.1f}" if style == "number" else text


def rich_table(section: str, rows: Sequence[Row]) -> Table:
    """What is printed of a section."""
    table = Table(*(title for title, _, _ in _SHOWN), title=f"{section}, tokens/s (emulated)")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The same as Markdown."""
    titles = [title for title, _, _ in _SHOWN]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join(lines + [f"| {' | '.join(_cells(row))} |" for row in rows])


def gains(rows: Sequence[Row], paper: Paper) -> list[tuple[str, str, float | None, float, float]]:
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


def _row(rows: Sequence[Row], section: str, system: str, in_flight: int) -> Row | None:
    for row in rows:
        if (row["section"], row["system"], row["in_flight"]) == (section, system, str(in_flight)):
            return row
    return None


def _gain(above: Row, below: Row) -> tuple[float | None, float, float]:
    published = [row["paper_measured"] for row in (above, below)]
    paper = float(published[0]) / float(published[1]) if all(published) else None
    return paper, float(above["theory"]) / float(below["theory"]), float(above["measured"]) / float(below["measured"])
