"""What commands of perf have in common: options with several values, refusals, rows as CSV, JSON and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from perf.command import application
from perf.rows import read_rows, report, shown, table

IN_FLIGHT = [1, 2]


def command(
    inflight: Annotated[list[int], typer.Option(min=1)] = IN_FLIGHT,
    names: Annotated[list[str], typer.Option()] = [],  # noqa: B006
    seconds: float = 1.0,
) -> None:
    if seconds < 0:
        raise ValueError("--seconds is negative")
    print(inflight, names, seconds)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "[1, 2] [] 1.0"),
        ("--inflight 4 8 16 --seconds 2", "[4, 8, 16] [] 2.0"),
        ("--inflight 4 --inflight 8", "[4, 8] [] 1.0"),
        ("--names small=1,large=3 best --inflight=4", "[4] ['small=1,large=3', 'best'] 1.0"),
    ],
)
def test_an_option_takes_several_values(arguments: str, expected: str) -> None:
    assert CliRunner().invoke(application(command), arguments.split()).output == f"{expected}\n"


@pytest.mark.parametrize("arguments", ["--seconds 2 3", "--inflight 0", "--inflight 4 x", "4", "--seconds -1"])
def test_what_is_wrong_ends_with_code_2(arguments: str) -> None:
    assert CliRunner().invoke(application(command, ValueError), arguments.split()).exit_code == 2


def test_the_help_is_the_docstring_of_the_module_with_its_lines() -> None:
    help_text = CliRunner().invoke(application(command), ["--help"]).output
    assert (__doc__ or "").strip() in help_text.replace("\n  ", "\n")


def test_rows_are_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"n": 1, "rate": 2.25, "gain": None}, {"n": 2, "rate": 3.0, "gain": 0.5, "why": "[more]"}]
    columns = {"in flight": ("n", ""), "tokens/s": ("rate", ".1f"), "gain": ("gain", "+.1%"), "why": ("why", "")}
    texts = [shown(row, columns) for row in rows]
    assert [list(text.values()) for text in texts] == [["1", "2.2", "-", "-"], ["2", "3.0", "+50.0%", "[more]"]]
    report(rows, table(texts, "a title"), csv_file=tmp_path / "new" / "rows.csv")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("a title", "in flight", "+50.0%"))
    again = read_rows(tmp_path / "new" / "rows.csv")
    assert again[0] == {"n": "1", "rate": "2.25", "gain": "", "why": ""}
    assert [shown(row, columns) for row in again] == texts
    report(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows
