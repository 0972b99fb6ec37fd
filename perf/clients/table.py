"""Rows of load tests as a table on the screen and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All columns, in the order of their first appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def table_of(rows: Sequence[Row], title: str = "") -> Table:
    """Every row as a column, since rows are wide."""
    table = Table(title=title or None, show_header=False)
    for column in columns_of(rows):
        table.add_row(column, *(str(row.get(column, "")) for row in rows))
    return table


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns_of(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows to a CSV, which is made if it is not there.

    Raises:
        ValueError: the file has other columns.
    """
    if not path.is_file():
        return write_rows(path, rows)
    with path.open(newline="") as file:
        earlier = list(csv.DictReader(file))
    if columns_of(earlier) != columns_of(rows):
        raise ValueError(f"{path} has other columns: {', '.join(columns_of(earlier))}; remove it or name another file")
    return write_rows(path, [*earlier, *rows])
