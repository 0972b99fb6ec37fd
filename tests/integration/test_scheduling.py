"""Batches in the running server: which start, why, what changes with the number in flight, and who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from perf.emulated.repository import write_emulated_repository
from tests.support.grpc_calls import GrpcStream, Message
from tests.support.waiting import PATIENCE_S, metric, until, wait_idle
from tests.support.watch import WATCH
from tokenrouter.metrics_page import Scrape, fresh_scrape, scrape
from tools.load import Stream, request_bytes
from tools.profile.__main__ import profile_text
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

ENTRY = "tokenrouter"
STEP_MS = {"small": 3.0, "large": 6.0}
LEAVE = 0.5
MOST = 8
DELAY_MS = 200.0
TABLES = {"small": {1: 1, 4: 2, 16: 3}, "large": {1: 1, 4: 3, 16: 4}}
NEW_TOKENS = 128
IN_FLIGHT = (2, 4, 16, 24)
ENOUGH = 20
ONLY_SMALL = {"policy": "single", "policy_params": json.dumps({"model": "small"})}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two emulated models: tables of thresholds, a long delay, at most `MOST` rows and `NEW_TOKENS` in a step."""
    repository = write_emulated_repository(
        tmp_path_factory.mktemp("scheduling") / "repository",
        step_ms=dict(STEP_MS),
        entry={"policy": "random", "policy_params": {"p": LEAVE}, "aliases": {}},
        batching={
            name: {
                "threshold": table[16],
                "batch_thresholds": table,
                "max_queue_delay_microseconds": round(1e3 * DELAY_MS),
            }
            for name, table in TABLES.items()
        },
        options={"max_batch_size": MOST, "max_num_tokens": NEW_TOKENS},
    )
    with WATCH.over(TritonServer(repository)) as running:
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
        until(lambda: metric(self._server, "in_flight", model=ENTRY) == in_flight, what=f"{in_flight} run")


@dataclass(frozen=True)
class Window:
    """What the steps of a while added to the metrics of each model; the first with a new number in flight are left out.

    A page is published series by series, reasons before batch sizes. So `reasons` reaches to the page after the last of
    `steps`: every step whose size is here has its reason here.
    """

    steps: dict[str, Scrape]
    reasons: dict[str, Scrape]

    def sizes(self, model: str) -> dict[int, float]:
        """Batch size -> steps."""
        return sizes(self.steps[model], model)

    def why(self, model: str) -> dict[str, float]:
        """Reason -> steps that started for it."""
        delta, name = self.reasons[model], "tokenrouter_steps_by_reason"
        counts = {reason: delta.value(name, model=model, reason=reason) for reason in delta.labels(name, "reason")}
        return {reason: count for reason, count in counts.items() if count}


def sizes(delta: Scrape, model: str) -> dict[int, float]:
    labels = delta.labels("tokenrouter_batch_steps", "batch", model=model)
    counts = {int(size): delta.value("tokenrouter_batch_steps", model=model, batch=size) for size in labels}
    return {size: count for size, count in sorted(counts.items()) if count}


def look(server: TritonServer) -> dict[str, Scrape]:
    """The next page that each model publishes."""
    with ThreadPoolExecutor(len(STEP_MS)) as pool:
        pages = pool.map(lambda model: fresh_scrape(server.metrics_url, model, patience_s=PATIENCE_S), STEP_MS)
        return dict(zip(STEP_MS, pages, strict=True))


def window(server: TritonServer) -> Window:
    look(server)
    before = last = look(server)

    def steps() -> dict[str, Scrape]:
        return {model: page.since(before[model]) for model, page in last.items()}

    while any(sum(sizes(delta, model).values()) <= ENOUGH for model, delta in steps().items()):
        last = look(server)
    after = look(server)
    return Window(steps(), {model: page.since(before[model]) for model, page in after.items()})


@dataclass(frozen=True)
class Measured:
    """Windows by number in flight, and the metrics before and after all of them."""

    windows: dict[int, Window]
    before: Scrape
    after: Scrape


@pytest.fixture(scope="module")
def measured(server: TritonServer) -> Measured:
    before, windows = scrape(server.metrics_url), {}
    for in_flight in IN_FLIGHT:
        with Load(server, in_flight):
            windows[in_flight] = window(server)
    wait_idle(server)
    return Measured(windows, before, scrape(server.metrics_url))


@pytest.mark.parametrize("in_flight", [4, 16, 24])
def test_no_batch_is_under_the_threshold_or_over_the_maximum(measured: Measured, in_flight: int) -> None:
    seen = measured.windows[in_flight]
    for model, table in TABLES.items():
        threshold = table[max(n for n in table if n <= in_flight)]
        found, why = seen.sizes(model), seen.why(model)
        assert sum(found.values()) > ENOUGH, found
        under = sum(count for size, count in found.items() if size < threshold)
        assert under <= why.get("deadline", 0.0) + why.get("all_ready", 0.0), (model, found, why)
        assert max(found) <= MOST, (model, found)


def test_batches_grow_with_the_load(measured: Measured) -> None:
    means = []
    for in_flight in IN_FLIGHT:
        found = measured.windows[in_flight].sizes("large")
        means.append(sum(size * count for size, count in found.items()) / sum(found.values()))
    assert means == sorted(means)
    assert means[0] < 2.0 < means[-1]


def test_the_profiler_finds_the_deployment_again(measured: Measured) -> None:
    text, profile = profile_text(measured.before, measured.after, "test")
    assert profile.names == ("small", "large")
    assert profile.entry == "small"
    assert profile.models["small"].max_batch == MOST
    delta = measured.after.since(measured.before)
    for name, step_ms in STEP_MS.items():
        took_ms = 1e3 * delta.value("tokenrouter_batch_step_seconds", model=name, batch="1")
        took_ms /= delta.value("tokenrouter_batch_steps", model=name, batch="1")
        assert step_ms <= profile.models[name].step_time_ms(1) == pytest.approx(took_ms, rel=0.1), text
    assert profile.routing["large"]["small"] == pytest.approx(1.0, abs=0.02)
    assert profile.routing["small"]["large"] == pytest.approx(LEAVE, abs=0.12)
    assert profile.commit["small"] == {"small": 1.0, "large": 0.0}
    assert 0.0 <= profile.handoff_ms <= profile.models["small"].step_time_ms(1)


def test_a_lone_request_never_waits_and_the_table_holds_from_the_next_step_on(server: TritonServer) -> None:
    with Load(server, 16) as load:
        look(server)
        load.leave(1)
        alone = window(server)
    for model in STEP_MS:
        assert alone.sizes(model).keys() == {1}
        assert alone.why(model).keys() == {"threshold"}
        delta = alone.steps[model]
        mean_ms = 1e3 * delta.value("tokenrouter_ready_wait_seconds_sum", model=model)
        mean_ms /= delta.value("tokenrouter_ready_wait_seconds_count", model=model)
        assert mean_ms < DELAY_MS / 4, f"{model}: {mean_ms:.1f} ms; the delay is {DELAY_MS:g} ms"


def written(messages: list[Message], request_id: str) -> int:
    return sum(len(message.ids) for message in messages if message.request_id == request_id)


def until_first(messages: list[Message], request_id: str) -> list[Message]:
    """What came before the first message of a request."""
    return messages[: [message.request_id for message in messages].index(request_id)]


def test_a_burst_gets_its_first_tokens_before_anybody_goes_far(server: TritonServer) -> None:
    names = [f"{i}" for i in range(32)]
    with GrpcStream(server) as call:
        for i, name in enumerate(names):
            fields = {"text_input": "x" * 40, "max_tokens": 400, "stream": True, "seed": i}
            call.send(fields, request_id=name)
        until(lambda: all(call.of(name) for name in names), what="32 first tokens")
        earlier = max((until_first(call.messages, name) for name in names), key=len)
    most = max(written(earlier, name) for name in names)
    print(f"{most} tokens at most before the last of the first tokens")
    assert most < 40
    wait_idle(server)


def test_a_long_prompt_does_not_stall_running_streams(server: TritonServer) -> None:
    """It comes in pieces: every step with one of them decodes the streams as well."""
    pieces = 150
    names = [f"{i}" for i in range(4)]
    with GrpcStream(server) as call:
        for i, name in enumerate(names):
            fields = {"text_input": "x" * 40, "max_tokens": 1 << 19, "stream": True, "seed": i, **ONLY_SMALL}
            call.send(fields, request_id=name)
        until(lambda: all(call.of(name) for name in names), what="four running streams")
        before = len(call.messages)
        prompt = "p" * (pieces * (NEW_TOKENS - len(names)))
        call.send({"text_input": prompt, "max_tokens": 1, "stream": True, **ONLY_SMALL}, request_id="long")
        assert call.wait("long")[0].text == "p"
        meanwhile = until_first(call.messages, "long")[before:]
    counts = [written(meanwhile, name) for name in names]
    print(f"{counts} tokens beside a prompt of {pieces} pieces")
    assert min(counts) > pieces / 2
    wait_idle(server)


def test_an_idle_server_stops_by_itself(server: TritonServer) -> None:
    """Last: it ends the server of this file. Triton's exit code is another one if the grace time was not enough."""
    wait_idle(server)
    assert server.stop() == 0
