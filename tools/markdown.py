"""Tables for documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a line break at its end."""
    lines = [_line(columns), "|" + "---|" * len(columns), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
