"""Tables of the performance page are those of the files that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.load import table as load_tests
from perf.load.soak import table as soak
from perf.rows import read_rows
from perf.serving.tables import efficiency

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
RESULTS = ROOT / "perf" / "results"


@pytest.mark.parametrize("name", ["perf_analyzer/sweep.csv", "locust.csv"])
def test_tables_of_load_tests_are_in_the_page(name: str) -> None:
    expected = load_tests.markdown(read_rows(RESULTS / name))
    assert expected in PAGE
    assert expected.count("\n") > 5


def test_the_table_of_efficiency_is_in_the_page() -> None:
    rows = read_rows(RESULTS / "efficiency.csv", RESULTS / "efficiency_64.csv")
    assert efficiency(rows) in PAGE
    assert [int(row["in_flight"]) for row in rows] == [1, 2, 4, 8, 16, 32, 64]


def test_the_outcome_of_the_soak_is_in_the_page_and_is_good() -> None:
    outcome = json.loads((RESULTS / "soak.json").read_text())
    assert soak.markdown(outcome).splitlines()[0] in PAGE.replace("\n", " ")
    assert "\n".join(soak.markdown(outcome).splitlines()[2:]) in PAGE
    assert outcome["failures"] == []
    assert outcome["seconds"] >= 600
    assert outcome["in_flight"] >= 16
