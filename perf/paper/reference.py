"""The paper's published numbers, from `perf/reference/paper.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import msgspec

from tokenrouter.yaml_files import load_yaml

PATH = Path(__file__).resolve().parent.parent / "reference" / "paper.yaml"

Value: TypeAlias = str | float | bool


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of the text, its unit ("" is a pure number), and where it stands."""

    value: float
    unit: str
    place: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table or figure: where it stands, what it shows, the unit of its numbers, and its rows."""

    place: str
    what: str
    unit: str
    rows: list[dict[str, Value]]

    def __post_init__(self) -> None:
        """Refuses tables without rows, and rows with different columns."""
        if not self.rows or any(row.keys() != self.rows[0].keys() for row in self.rows):
            raise ValueError(f"{self.place}: rows are missing, or differ in their columns")

    def number(self, column: str, **where: Value) -> float | None:
        """A number of the row with these values; None if there is no such row.

        Raises:
            KeyError: no such column.
        """
        for row in self.rows:
            if all(row[name] == value for name, value in where.items()):
                return float(row[column])
        return None


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    title: str
    source: str
    facts: dict[str, Fact]
    tables: dict[str, Table]


def load_paper(path: Path = PATH) -> Paper:
    """Reads the file; msgspec names the field that is wrong."""
    return msgspec.convert(load_yaml(path), Paper)
