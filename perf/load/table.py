"""Rows of load tests as a table on the screen, as CSV, and as Markdown (`python -m perf.load.table FILE.csv`)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

Row = Mapping[str, Any]

SHORT = {
    "loop": "loop",
    "in_flight": "in flight",
    "requests": "requests",
    "errors": "errors",
    "tokens_per_second": "tokens/s",
    "time_to_first_token_ms.p50": "first token, p50",
    "time_to_first_token_ms.p99": "p99",
    "inter_token_ms.p50": "inter-token, p50",
    "inter_token_ms.p99": "p99",
    "latency_ms.p50": "latency, p50",
    "latency_ms.p99": "p99",
    "client_cpu_s_per_1000_tokens": "client CPU s per 1,000 tokens",
}
"""Columns of the Markdown table; times in milliseconds."""


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


def markdown(rows: Sequence[Row]) -> str:
    """The columns of `SHORT` that there are, after the tool's user."""
    shown = [column for column in SHORT if any(column in row for row in rows)]
    lines = ["| user | " + " | ".join(SHORT[column] for column in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for row in rows:
        lines.append(f"| {row['user']} | " + " | ".join(str(row.get(column, "")) or "-" for column in shown) + " |")
    return "\n".join(lines)


def main(files: Annotated[list[Path], typer.Argument(help="CSV files of locust or perf_analyzer runs.")]) -> None:
    """Prints Markdown."""
    rows: list[Row] = []
    for path in files:
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    print(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
