from __future__ import annotations

from pathlib import Path

import pytest

from perf.compare import __main__ as compare
from perf.compare.cells import OURS, Cell
from perf.compare.results import Results

pytestmark = pytest.mark.integration


def test_a_comparison_through_the_real_server_writes_rows_table_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cell = tmp_path / "rows.csv", Cell("r2r", "low-effort", 2)
    compare.main(
        policies=["r2r"],
        workloads=["low-effort"],
        inflight=[2],
        systems=[OURS, "lock-step"],
        scale=256,
        seconds=1.5,
        warm_up=0.2,
        csv=path,
        plot=tmp_path / "plot.png",
    )
    results = Results.load(path)
    for system in (OURS, "lock-step"):
        assert results.number(cell, system, "tokens_per_second") > 0
        assert results.number(cell, system, "responses") >= 2
        assert 0 < results.number(cell, system, "ttft_p50_ms") < results.number(cell, system, "e2e_p50_ms")
    assert results.number(cell, OURS, "limit") == pytest.approx(110.3, abs=0.1)
    assert (tmp_path / "plot.png").is_file()
    printed = capsys.readouterr().out
    assert "emulated" in printed
    assert "lock-step" in printed
