"""The file of measured rows: a measurement in pieces adds to it, and tables and plots are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path

from perf.compare.cells import ANY, OURS, Cell
from perf.rows import rows_so_far, write_rows

KEY = ("policy", "workload", "in_flight", "system")


@dataclass
class Results:
    """Rows by the columns of `KEY`; a later row of the same takes the place of an earlier one."""

    rows: dict[tuple[str, ...], dict[str, str]]

    @classmethod
    def load(cls, path: Path) -> Results:
        """What a file has; nothing if there is none."""
        return cls({tuple(row[name] for name in KEY): row for row in rows_so_far(path)})

    def add(self, cell: Cell, system: str, values: Mapping[str, object]) -> None:
        key = (cell.policy, cell.workload, str(cell.in_flight), system)
        self.rows[key] = {**dict(zip(KEY, key, strict=True)), **{name: _text(value) for name, value in values.items()}}

    def save(self, path: Path) -> None:
        write_rows(path, [self.rows[key] for key in self._keys()])

    def _keys(self) -> list[tuple[str, ...]]:
        return sorted(self.rows, key=lambda key: (*key[:2], int(key[2]), key[3]))

    def row(self, cell: Cell, system: str) -> dict[str, str]:
        """The row of a system in a cell; systems without routing have one for all policies. Empty if there is none."""
        key = (cell.workload, str(cell.in_flight), system)
        return self.rows.get((cell.policy, *key)) or self.rows.get((ANY, *key)) or {}

    def number(self, cell: Cell, system: str, column: str = "tokens_per_second") -> float:
        """One number; NaN if it was not measured."""
        return float(self.row(cell, system).get(column) or nan)

    def ratio(self, cell: Cell, system: str) -> float:
        """Ours over this system; above 1 we are faster. NaN if one of them was not measured."""
        return self.number(cell, OURS) / self.number(cell, system)

    def systems(self) -> list[str]:
        return list(dict.fromkeys(key[3] for key in self.rows))

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(cell.workload for cell in self.cells()))

    def cells(self) -> list[Cell]:
        """Cells with routing, in order."""
        found = dict.fromkeys(key[:3] for key in self._keys() if key[0] != ANY)
        return [Cell(policy, workload, int(n)) for policy, workload, n in found]


def _text(value: object) -> str:
    """Five digits; nothing for NaN."""
    if isinstance(value, float):
        return "" if isnan(value) else f"{value:.5g}"
    return str(value)
