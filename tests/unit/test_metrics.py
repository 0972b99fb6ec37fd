"""What an orchestrator publishes, with a double of Triton's metrics."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import request, spec
from tokenrouter.errors import Overloaded, RouterError

Series = dict[tuple[str, str, str], float]


class Metric:
    def __init__(self, series: Series, key: tuple[str, str, str]) -> None:
        self._series, self._key = series, key
        series[key] = 0.0

    def set(self, value: float) -> None:
        self._series[self._key] = value

    def increment(self, value: float) -> None:
        assert 0.0 <= value < float("inf"), "Triton refuses it"
        self._series[self._key] += value


@pytest.fixture
def series(triton: ModuleType) -> Series:
    """Values by name, kind of label and label."""
    found: Series = {}

    class MetricFamily:
        GAUGE, COUNTER = "gauge", "counter"

        def __init__(self, *, name: str, description: str, kind: str) -> None:
            self._name = name

        def Metric(self, *, labels: dict[str, str]) -> Metric:
            kind, label = next(((k, v) for k, v in reversed(labels.items()) if k != "model"), ("", ""))
            return Metric(found, (self._name, kind, label))

    module: Any = triton
    module.MetricFamily = MetricFamily
    return found


def test_agreement_is_counted_by_policy(series: Series) -> None:
    from tokenrouter.triton.metrics import OrchestratorMetrics

    cluster = Cluster(engine={"repeat": True})
    metrics = OrchestratorMetrics("tokenrouter", cluster.orchestrator, "scripted")
    cluster.orchestrator.speculation.track("random")
    metrics.publish()
    assert series["tokenrouter_discarded_tokens", "policy", "random"] == 0
    key = cluster.submit(request([1, 2], max_tokens=40, end_ids=(), policy=spec("random", p=0.5)))
    cluster.run()
    metrics.publish()
    large = cluster.result(key).tokens_by_model["large"]
    for name in ("tokenrouter_discarded_tokens", "tokenrouter_agreed_tokens"):
        assert series[name, "policy", "random"] == large > 0
    assert series["tokenrouter_agreement", "policy", "random"] == 1.0


def reasons(series: Series, name: str) -> dict[str, float]:
    return {label: value for (found, kind, label), value in series.items() if (found, kind) == (name, "reason")}


def test_every_reason_and_writer_is_there_from_the_start_and_counts(series: Series) -> None:
    from tokenrouter.triton.metrics import OrchestratorMetrics

    cluster = Cluster()
    metrics = OrchestratorMetrics("tokenrouter", cluster.orchestrator, "scripted")
    metrics.publish()
    failed, finished = reasons(series, "tokenrouter_failed"), reasons(series, "tokenrouter_finished")
    assert {RouterError.slug, Overloaded.slug, "invalid_request", "prompt_too_long", "cancelled"} <= failed.keys()
    assert finished.keys() == {"stop", "length", "timeout"}
    assert not any([*failed.values(), *finished.values()])
    assert {writer for name, _, writer in series if name == "tokenrouter_tokens"} == {"small", "large"}

    cluster.submit(request([1, 2]))
    cancelled = cluster.submit(request([1, 2]))
    cluster.orchestrator.cancel(cancelled, now_ns=0)
    cluster.run()
    metrics.publish()
    assert reasons(series, "tokenrouter_failed") == failed | {"cancelled": 1}
    assert reasons(series, "tokenrouter_finished") == finished | {"stop": 1}


def test_series_are_given_back_before_their_families(triton: ModuleType) -> None:
    from tokenrouter.triton.metrics import OrchestratorMetrics

    gone: list[str] = []

    class Given:
        def __del__(self) -> None:
            gone.append(type(self).__name__)

    class Series(Given):
        def set(self, value: float) -> None: ...

        def increment(self, value: float) -> None: ...

    class MetricFamily(Given):
        GAUGE, COUNTER = "gauge", "counter"

        def __init__(self, **_: str) -> None: ...

        def Metric(self, *, labels: dict[str, str]) -> Series:
            return Series()

    module: Any = triton
    module.MetricFamily = MetricFamily
    metrics = OrchestratorMetrics("tokenrouter", Cluster().orchestrator, "scripted")
    metrics.publish()
    assert gone == []
    metrics.release()
    families = gone.count("MetricFamily")
    assert families > 1
    assert gone == ["Series"] * (len(gone) - families) + ["MetricFamily"] * families


def test_what_triton_would_refuse_is_never_sent_to_it(series: Series, caplog: pytest.LogCaptureFixture) -> None:
    from tokenrouter.triton.metrics import _Series

    published = _Series({"model": "m"})
    for value in (2.0, 1.0, -1.0, float("nan"), float("inf"), 3.0):
        published.counter("a", "text", value)
    for value in (2.0, -1.0, float("nan"), float("-inf")):
        published.gauge("b", "text", value)
    assert series == {("a", "", ""): 3.0, ("b", "", ""): -1.0}
    assert [record.getMessage()[:20] for record in caplog.records] == ["a(('model', 'm'),) w", "b(('model', 'm'),) w"]
