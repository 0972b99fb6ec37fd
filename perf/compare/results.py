"""The file of measured rows: a measurement in pieces adds to it, and tables and plots are made from it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path

from perf.compare.cells import ANY, OURS, Cell

KEY = ("policy", "workload", "in_flight", "system")
Row = dict[str, str]


@dataclass
class Results:
    """Rows by cell and system; a later row of the same takes the place of an earlier one."""

    rows: dict[tuple[str, ...], Row]

    @classmethod
    def load(cls, path: Path) -> Results:
        """What a file has; nothing if there is none."""
        if not path.is_file():
            return cls({})
        with path.open(newline="") as file:
            return cls({_key(row): row for row in csv.DictReader(file)})

    def add(self, cell: Cell, system: str, values: Mapping[str, object]) -> None:
        """One measured row."""
        row = {"policy": cell.policy, "workload": cell.workload, "in_flight": str(cell.in_flight), "system": system}
        row |= {name: _text(value) for name, value in values.items()}
        self.rows[_key(row)] = row

    def save(self, path: Path) -> None:
        """Writes all rows, sorted."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [self.rows[key] for key in sorted(self.rows, key=_order)]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def row(self, cell: Cell, system: str) -> Row | None:
        """The row of a system in a cell; systems without routing have one for all policies."""
        for policy in (cell.policy, ANY):
            found = self.rows.get((policy, cell.workload, str(cell.in_flight), system))
            if found is not None:
                return found
        return None

    def number(self, cell: Cell, system: str, column: str) -> float:
        """One number; NaN if it was not measured."""
        text = (self.row(cell, system) or {}).get(column, "")
        return float(text) if text else nan

    def ratio(self, cell: Cell, system: str, column: str = "tokens_per_second") -> float:
        """Ours over this system; above 1 we are faster. NaN if one of them was not measured."""
        return self.number(cell, OURS, column) / self.number(cell, system, column)

    def systems(self) -> list[str]:
        """Names of all systems with rows."""
        return list(dict.fromkeys(key[3] for key in self.rows))

    def workloads(self) -> list[str]:
        """Of all cells."""
        return list(dict.fromkeys(cell.workload for cell in self.cells()))

    def cells(self) -> list[Cell]:
        """Cells with routing, in order."""
        found = dict.fromkeys(key[:3] for key in sorted(self.rows, key=_order) if key[0] != ANY)
        return [Cell(policy, workload, int(n)) for policy, workload, n in found]


def _text(value: object) -> str:
    """Five digits; nothing for NaN."""
    if isinstance(value, float):
        return "" if isnan(value) else f"{value:.5g}"
    return str(value)


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def _order(key: Sequence[str]) -> tuple[str, str, int, str]:
    return key[0], key[1], int(key[2]), key[3]
