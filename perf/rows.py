"""Rows of measurements: CSV files, and tables on the screen and for documents."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.markdown import markdown

Row = Mapping[str, Any]
Columns = Mapping[str, tuple[str, str]]
"""Heading -> column and how its numbers are written; "" for text."""
_WIDTH = 170  # where nobody looks at a terminal


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All columns, in the order of their first appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def read_rows(*paths: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for path in paths:
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def rows_so_far(path: Path) -> list[dict[str, str]]:
    """Rows of a file that may not be there yet."""
    return read_rows(path) if path.is_file() else []


def write_rows(path: Path, rows: Sequence[Row]) -> None:
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
    earlier = rows_so_far(path)
    if earlier and columns_of(earlier) != columns_of(rows):
        raise ValueError(f"{path} has other columns: {', '.join(columns_of(earlier))}; remove it or name another file")
    write_rows(path, [*earlier, *rows])


def shown(row: Row, columns: Columns) -> dict[str, str]:
    """Heading -> text; "-" for what the row does not have."""

    def text(value: Any, form: str) -> str:
        if value in (None, "") or value != value:  # NaN: a mean of nothing
            return "-"
        return format(float(value), form) if form else str(value)

    return {heading: text(row.get(column), form) for heading, (column, form) in columns.items()}


def table(rows: Iterable[Mapping[str, str]], title: str = "") -> Table:
    """Rows by heading."""
    listed = list(rows)
    result = Table(*columns_of(listed), title=title or None)
    for row in listed:
        result.add_row(*row.values())
    return result


def markdown_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows by heading, as a Markdown table."""
    return markdown(columns_of(rows), ([*row.values()] for row in rows))


def upright(rows: Sequence[Row], title: str = "") -> Table:
    """Every row as a column, where rows are wide."""
    result = Table(title=title or None, show_header=False)
    for column in columns_of(rows):
        result.add_row(column, *(str(row.get(column, "")) for row in rows))
    return result


def show(*tables: Table) -> None:
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(*tables)


def report(rows: Sequence[Row], *tables: Table, as_json: bool = False, csv_file: Path | None = None) -> None:
    """What a command found: prints the tables, or all columns as JSON; also writes a CSV file, if one is named."""
    if csv_file is not None:
        write_rows(csv_file, rows)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        show(*tables)
