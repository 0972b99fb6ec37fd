"""Rows, ratios and cells of the comparison with the paper's figures; nothing is measured here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from perf.paper.__main__ import main
from perf.paper.cells import BARRIER, BEST, EAGER, SECTIONS, Cell
from perf.paper.reference import load_paper
from perf.paper.table import Text, figures, gains, row_of, write
from perf.rows import markdown_of, rows_so_far
from tools.errors import CommandError

PAPER = load_paper()


def measurement(rate: float) -> dict[str, Any]:
    """What is read of a row of `perf.serving`."""
    return {
        "tokens_per_second": rate,
        "windows": 2,
        "spread": 0.02,
        "difference_as_drawn": rate / 100.0 - 1.0,
        "mean_handoff_ms.small": math.nan,
        "mean_handoff_ms.large": 0.5,
        "around_ms.small": 0.4,
    }


def row(section: str, system: str, in_flight: int, measured: float, published: float | None = None) -> Text:
    """A row as if it had been measured; thresholds of 1 for all systems but the barrier."""
    thresholds = () if system == BARRIER else (1, 1)
    cell = Cell(section, system, "r2r", in_flight, thresholds, None, published)
    return row_of(cell, measurement(measured), 12.0)


def test_sections_have_the_papers_cells_and_share_measurements() -> None:
    # Three models take a search of some ten seconds.
    cells = {name: section(PAPER, False) for name, section in SECTIONS.items() if name != "three_models"}
    assert {name: len(found) for name, found in cells.items()} == {"figure_10": 9, "table_6": 9, "scaling": 5}
    assert {cell.key for cell in cells["table_6"]} & {cell.key for cell in cells["figure_10"]} == {
        ("r2r", (1, 1), 4),
        ("r2r", (1, 3), 4),
    }
    assert [cell.thresholds for cell in cells["scaling"]] == [(1, 1), (1, 2), (1, 3), (1, 5), (2, 10)]
    assert all(cell.paper_measured for cell in cells["table_6"])
    for name, found in cells.items():
        assert 0 < len(SECTIONS[name](PAPER, True)) < len(found)
    assert {cell.policy for cell in SECTIONS["three_models"](PAPER, True)} == {"me"}


def test_theory_is_the_chain_or_its_counterpart_with_a_barrier() -> None:
    found = {cell.system: cell.theory() for cell in SECTIONS["table_6"](PAPER, True)}
    assert found == {
        BEST: pytest.approx(207.95, abs=0.1),
        EAGER: pytest.approx(187.2, abs=0.1),
        BARRIER: pytest.approx(139.1, abs=0.1),
    }


def test_relative_errors() -> None:
    cell = Cell("figure_10", "threshold 1", "r2r", 2, (1, 1), 99.0, 94.4)
    found = row_of(cell, {**measurement(90.0), "windows": 1, "difference_as_drawn": 90.0 / 95.0 - 1.0}, 12.0)
    assert found["kind"] == "emulated"
    assert float(found["theory_over_paper_theory"]) == pytest.approx(0.0, abs=1e-3)
    assert float(found["measured_over_paper_measured"]) == pytest.approx(90.0 / 94.4 - 1, abs=1e-4)
    assert float(found["measured_over_as_drawn"]) == pytest.approx(90.0 / 95.0 - 1, abs=1e-4)
    assert float(found["measured_over_theory"]) == pytest.approx(90.0 / float(found["theory"]) - 1, abs=1e-4)
    assert (found["spread"], found["handoff_ms"], found["around_ms"]) == ("", "0.500", "0.400")


def test_gains_follow_from_the_rows() -> None:
    rows = [
        row("table_6", BEST, 4, 220.0, 210.61),
        row("table_6", EAGER, 4, 200.0, 161.26),
        row("table_6", BARRIER, 4, 100.0, 143.88),
        row("scaling", BEST, 1, 60.0),
        row("scaling", BEST, 16, 600.0),
    ]
    found = {what: (paper, measured) for what, _, paper, _, measured in gains(rows, PAPER)}
    assert found["delay, 4 in flight"] == (pytest.approx(1.306, abs=1e-3), pytest.approx(1.1))
    assert found["asynchronous execution, 4 in flight"] == (pytest.approx(1.121, abs=1e-3), pytest.approx(2.0))
    assert found["throughput, 16 over 1 in flight"] == (8.61, pytest.approx(10.0))
    assert found["speed of one user at 16, of that at 1"] == (51.7, pytest.approx(62.5))
    assert gains(rows[:1], PAPER) == []


def test_the_file_is_read_back_in_the_order_of_sections(tmp_path: Path) -> None:
    path = tmp_path / "results" / "paper.csv"
    rows = [row("scaling", BEST, 1, 60.0), row("table_6", BEST, 4, 220.0, 210.61)]
    write(path, rows)
    assert rows_so_far(path) == rows[::-1]
    assert rows_so_far(tmp_path / "none.csv") == []
    assert "+4.5%" in markdown_of(figures([rows[1]]))


def test_a_report_needs_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paper.csv"
    with pytest.raises(CommandError, match="has no rows"):
        main(report=True, csv=path, image=tmp_path / "plot.png")
    cells = SECTIONS["figure_10"](PAPER, False)
    write(path, [row_of(cell, measurement(100.0), 12.0) for cell in cells])
    main(report=True, csv=path, image=tmp_path / "plot.png")
    assert "emulated" in capsys.readouterr().out
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("section", SECTIONS)
def test_the_performance_page_shows_the_file(section: str) -> None:
    root = Path(__file__).parents[2]
    rows = [row for row in rows_so_far(root / "perf" / "results" / "paper.csv") if row["section"] == section]
    assert len(rows) >= 5
    assert markdown_of(figures(rows)) in (root / "docs" / "performance.md").read_text("utf-8")
