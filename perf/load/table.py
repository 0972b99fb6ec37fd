"""`python -m perf.load.table FILE.csv ...`: rows of locust or perf_analyzer as Markdown; times in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.rows import Row, read_rows
from tools import markdown as tables

_HEADINGS = {
    "user": "user",
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


def markdown(rows: Sequence[Row]) -> str:
    """The columns of `_HEADINGS` that there are."""
    columns = [column for column in _HEADINGS if any(column in row for row in rows)]
    cells = ([str(row.get(column, "")) or "-" for column in columns] for row in rows)
    return tables.markdown([_HEADINGS[column] for column in columns], cells)


def main(files: Annotated[list[Path], typer.Argument(help="CSV files of locust or perf_analyzer runs.")]) -> None:
    print(markdown(read_rows(*files)))


if __name__ == "__main__":
    run(main)
