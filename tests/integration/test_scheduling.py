"""Thresholds in the running server: which batches start, why, and what changes with the number in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from perf.emulated.repository import write_emulated_repository
from tests.support.waiting import until
from tools.load import Stream, request_bytes
from tools.metrics import Scrape, fresh_scrape, scrape
from tools.profile.__main__ import profile_text
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

ENTRY = "tokenrouter"
STEP_MS = {"small": 3.0, "large": 6.0}
LEAVE = 0.5
MOST = 8
DELAY_MS = 200.0
TABLES = {"small": {1: 1, 4: 2, 16: 3}, "large": {1: 1, 4: 3, 16: 4}}
WINDOW_S = 1.2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two emulated models with tables of thresholds, batches of at most `MOST`, and a long delay."""
    repository = write_emulated_repository(
        tmp_path_factory.mktemp("scheduling") / "repository",
        step_ms=dict(STEP_MS),
        entry={"policy": "random", "policy_params": {"p": LEAVE}, "ensemble": None},
        batching={
            name: {
                "threshold": table[16],
                "batch_thresholds": table,
                "max_queue_delay_microseconds": round(1e3 * DELAY_MS),
            }
            for name, table in TABLES.items()
        },
        options={"max_batch_size": MOST},
    )
    with TritonServer(repository) as running:
        yield running


class Load:
    """Endless responses; a context manager that takes them away."""

    def __init__(self, server: TritonServer, in_flight: int) -> None:
        self._server = server
        self._streams = [Stream(server.grpc_url) for _ in range(in_flight)]

    def __enter__(self) -> Load:
        for seed, stream in enumerate(self._streams):
            stream.send(request_bytes(ENTRY, "abcdefgh", max_tokens=1 << 19, seed=seed))
        self.wait_for(len(self._streams))
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave(0)

    def leave(self, stay: int) -> None:
        """All but the first `stay` clients go away."""
        for stream in self._streams[stay:]:
            stream.close()
        del self._streams[stay:]
        self.wait_for(stay)

    def wait_for(self, in_flight: int) -> None:
        """Until so many run, as the entry model says."""
        url = self._server.metrics_url
        until(lambda: scrape(url).value("tokenrouter_in_flight", model=ENTRY) == in_flight, what=f"{in_flight} run")


def window(server: TritonServer) -> Scrape:
    """What is added to the metrics in a short time; the first steps with a new number in flight are not in it."""
    fresh_scrape(server.metrics_url, ENTRY)
    before = fresh_scrape(server.metrics_url, ENTRY)
    time.sleep(WINDOW_S)
    return fresh_scrape(server.metrics_url, ENTRY).since(before)


def sizes(delta: Scrape, model: str) -> dict[int, float]:
    """Batch size -> steps."""
    labels = delta.labels("tokenrouter_batch_steps", "batch", model=model)
    counts = {int(size): delta.value("tokenrouter_batch_steps", model=model, batch=size) for size in labels}
    return {size: count for size, count in sorted(counts.items()) if count}


def reasons(delta: Scrape, model: str) -> dict[str, float]:
    """Reason -> steps that started for it."""
    name = "tokenrouter_steps_by_reason"
    counts = {reason: delta.value(name, model=model, reason=reason) for reason in delta.labels(name, "reason")}
    return {reason: count for reason, count in counts.items() if count}


@pytest.mark.parametrize("in_flight", [4, 16, 24])
def test_no_batch_is_under_the_threshold_or_over_the_maximum(server: TritonServer, in_flight: int) -> None:
    with Load(server, in_flight):
        delta = window(server)
    for model, table in TABLES.items():
        threshold = table[max(n for n in table if n <= in_flight)]
        found, why = sizes(delta, model), reasons(delta, model)
        assert sum(found.values()) > 20, found
        under = sum(count for size, count in found.items() if size < threshold)
        # A page of metrics is published series by series, so one of these may be a few steps ahead of the other.
        assert under <= why.get("deadline", 0.0) + why.get("all_ready", 0.0) + 1, (model, found, why)
        assert max(found) <= MOST, (model, found)


def test_batches_grow_with_the_load(server: TritonServer) -> None:
    means = []
    for in_flight in (2, 8, 24):
        with Load(server, in_flight):
            found = sizes(window(server), "large")
        means.append(sum(size * count for size, count in found.items()) / sum(found.values()))
    assert means == sorted(means)
    assert means[0] < 2.0 < means[-1]


def test_a_lone_request_never_waits_and_the_table_holds_from_the_next_step_on(server: TritonServer) -> None:
    with Load(server, 16) as load:
        fresh_scrape(server.metrics_url, ENTRY)
        load.leave(1)
        delta = window(server)
    assert sizes(delta, "small").keys() == sizes(delta, "large").keys() == {1}
    for model in STEP_MS:
        assert reasons(delta, model).keys() == {"threshold"}
        mean_ms = 1e3 * delta.value("tokenrouter_ready_wait_seconds_sum", model=model)
        mean_ms /= delta.value("tokenrouter_ready_wait_seconds_count", model=model)
        assert mean_ms < 5.0, f"{model}: {mean_ms:.1f} ms; the delay is {DELAY_MS:g} ms"


def test_the_profiler_finds_the_deployment_again(server: TritonServer) -> None:
    before = scrape(server.metrics_url)
    for in_flight in (1, 4):
        with Load(server, in_flight):
            window(server)
    text, profile = profile_text(before, scrape(server.metrics_url), "test")
    assert profile.names == ("small", "large")
    assert profile.entry == "small"
    assert profile.models["small"].max_batch == MOST
    for name, step_ms in STEP_MS.items():
        assert step_ms <= profile.models[name].step_time_ms(1) < step_ms + 3.0, text
    assert profile.routing["large"]["small"] == pytest.approx(1.0, abs=0.02)
    assert profile.routing["small"]["large"] == pytest.approx(LEAVE, abs=0.12)
    assert profile.commit["small"] == {"small": 1.0, "large": 0.0}
    assert 0.0 <= profile.handoff_ms < 3.0
