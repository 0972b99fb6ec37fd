"""docs/metrics.md lists every series that a server publishes."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tokenrouter.batcher import Batching
from tokenrouter.speculation import Agreement
from tokenrouter.statistics import CacheStatistics, OrchestratorStatistics, SubserverStatistics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
PARTS_OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


class Family:
    """Triton's MetricFamily; notes the names."""

    GAUGE, COUNTER = range(2)
    names: ClassVar[set[str]] = set()

    def __init__(self, *, name: str, description: str, kind: int) -> None:
        assert description
        self.names.add(name)

    def Metric(self, labels: dict[str, str]) -> Any:
        return SimpleNamespace(set=lambda value: None, increment=lambda value: None)


def subserver() -> Any:
    """One that has done everything there is a series for."""
    statistics = SubserverStatistics(routes={("large", True): 1}, cache=CacheStatistics())
    statistics.step_times.observe(1, 0, 0.1)
    info = SimpleNamespace(kv_blocks=8, max_batch=4)
    engine = SimpleNamespace(info=info, blocks_leased=0, blocks_used=0)
    return SimpleNamespace(
        engine=engine,
        model="small",
        statistics=statistics,
        open_sequences=0,
        residents=0,
        in_flight=0,
        batching=Batching(by_in_flight={4: 2}),
        threshold=2,
    )


def orchestrator() -> Any:
    once = Counter(something=1)
    return SimpleNamespace(
        statistics=OrchestratorStatistics(finished=once, failed=once, tokens=Counter({("r2r", "small"): 1})),
        settings=SimpleNamespace(models=("small",), all_replicas={"small": ("small",)}),
        is_connected=lambda replica: True,
        pinned=lambda replica: 0,
        in_flight=0,
        queued=0,
        reserved_blocks=lambda model: 0,
        speculation=SimpleNamespace(agreement={"r2r": Agreement()}),
    )


def test_the_readme_lists_every_series_that_is_published(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MetricFamily", Family, raising=False)
    metrics = importlib.import_module("tokenrouter.triton.metrics")
    metrics.SubserverMetrics("small").publish(subserver())
    metrics.OrchestratorMetrics("entry", orchestrator(), "r2r").publish()
    histograms = {name.removesuffix("_bucket") for name in Family.names if name.endswith("_bucket")}
    parts = {name + part for name in histograms for part in PARTS_OF_HISTOGRAMS}
    published = Family.names - parts | histograms
    listed = set(re.findall(r"`(tokenrouter_\w+?)(?:\{[\w,]+\})?`", PAGE.read_text("utf-8")))
    assert len(published) > 30
    assert published - listed == set()
    assert listed - published - {"tokenrouter_python"} == set()
