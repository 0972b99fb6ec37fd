"""Tables of the performance page's comparison and ablation are those of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.ablation import __main__ as ablation
from perf.compare import ideal, report
from perf.compare.results import Results
from perf.rows import markdown_of, read_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
RESULTS = ROOT / "perf" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("comparison_*.csv")), ids=lambda path: path.stem)
def test_tables_of_the_comparison_are_in_the_page(path: Path) -> None:
    if path.stem == "comparison_ideal":
        assert ideal.markdown(read_rows(path)) in PAGE
        return
    results = Results.load(path)
    assert results.workloads()
    for workload in results.workloads():
        assert report.markdown(results, workload) in PAGE


@pytest.mark.parametrize("path", sorted(RESULTS.glob("ablation_*.csv")), ids=lambda path: path.stem)
def test_tables_of_the_ablation_are_in_the_page(path: Path) -> None:
    assert markdown_of(ablation.rows(Results.load(path))) in PAGE
