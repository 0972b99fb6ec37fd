from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.repositories import END_ID
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import MS, expected_tokens, request, spec
from tokenrouter.batcher import Batching, Reason, WaitUntil
from tokenrouter.engines.base import nothing
from tokenrouter.engines.emulated.engine import EmulatedEngine
from tokenrouter.errors import ConfigError, EngineFailed, PolicyFailed, ProtocolError
from tokenrouter.messages import Hello, InFlight, Open, Outcome, PolicySpec, Report, Resume, Sampling
from tokenrouter.policies.base import Destinations, Handoff, Policy, PolicyContext, RouteBatch, Row, Visit
from tokenrouter.policies.cache import Loading, attempt
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.subserver import machine
from tokenrouter.subserver.machine import Loaded, Subserver
from tokenrouter.subserver.stepped import SteppingRunner

SINGLE = PolicySpec("single")
PROMPT = [10, 20, 30, 40, 50, 60]


class FailsOnce:
    """An engine whose n-th step raises."""

    def __init__(self, engine: EmulatedEngine, step: int) -> None:
        self._engine = engine
        self._left = step

    def step(self, rows: Any, meanwhile: Any = nothing) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("CUDA error: the device is on fire")
        return self._engine.step(rows, meanwhile)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Recording(FailsOnce):
    """An engine that notes the shape of every step."""

    def __init__(self, engine: EmulatedEngine) -> None:
        super().__init__(engine, 0)
        self.steps: list[list[int]] = []

    def step(self, rows: Any, meanwhile: Any = nothing) -> Any:
        self.steps.append([len(row.tokens) for row in rows])
        return super().step(rows, meanwhile)


class Notes(Policy):
    """Writes into the row's state at large, and clears it with what it sends from small."""

    name = "notes"
    two_models = True

    def route(self, batch: RouteBatch) -> Destinations:
        for row in batch.rows:
            if batch.model == "large":
                row.state["visits"] = row.state.get("visits", 0) + 1
                assert row.state["visits"] == 1, "a cleared state came back"
        return [True] * len(batch)

    def send(self, row: Row, target: str) -> Handoff:
        return Handoff(keep_token=True, state={} if row.model == "small" else None)


class Limits(Policy):
    """Two tokens a visit, and `route` must not be asked."""

    name = "limits"
    two_models = True

    def receive(self, row: Row) -> Visit:
        return Visit(limit=2, then=self.other(row.model))

    def route(self, batch: RouteBatch) -> Destinations:
        assert all(row.visit_tokens == 0 for row in batch.rows)
        return [batch.model] * len(batch)

    def send(self, row: Row, target: str) -> Handoff:
        raise AssertionError("a visit that ends by its limit does not ask send")


class Unloadable(Policy):
    """Its weights cannot be read."""

    def prepare(self, model: str) -> None:
        raise RuntimeError("no weights")


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("model", ["small", "large"])
def test_an_engine_that_raises_fails_only_the_requests_of_that_step(step: int, model: str) -> None:
    cluster = Cluster(wrap=lambda name, engine: FailsOnce(engine, step) if name == model else engine)
    victims = [cluster.submit(request(PROMPT)) for _ in range(2)]
    cluster.run()
    for key in victims:
        error = cluster.error(key)
        assert isinstance(error, EngineFailed)
        assert "on fire" in str(error)
        assert repr(model) in str(error)
    later = cluster.submit(request(PROMPT))
    cluster.run()
    assert cluster.result(later).tokens == [*PROMPT, END_ID]
    cluster.assert_conserved()


def test_a_pool_that_is_full_after_all_fails_that_request_only() -> None:
    cluster = Cluster()
    engine = cluster.subserver("small").engine
    hog = engine.open(kv_tokens=engine.info.max_context, prompt_tokens=1)
    key = cluster.submit(request(PROMPT))
    cluster.run()
    assert isinstance(cluster.error(key), EngineFailed)
    engine.close(hog)
    key = cluster.submit(request(PROMPT))
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]
    cluster.assert_conserved()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        pytest.param(InFlight(1), "InFlight before Hello", id="no-hello"),
        pytest.param(Hello(PROTOCOL_VERSION + 1, "x", "routed", ("small",), SINGLE), "version", id="version"),
        pytest.param(Hello(PROTOCOL_VERSION, "x", "loot", ("small",), SINGLE), "'loot'", id="unknown-share"),
        pytest.param(Hello(PROTOCOL_VERSION, "x", "routed", ("b",), SINGLE), "small", id="other-deployment"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_refused(message: Any, says: str) -> None:
    subserver = Cluster().subserver("small")
    with pytest.raises(ProtocolError, match=says):
        subserver.handle(99, message, now_ns=0)


def test_a_second_hello_is_refused() -> None:
    cluster = Cluster()
    hello = Hello(PROTOCOL_VERSION, "x", "routed", ("small",), SINGLE)
    with pytest.raises(ProtocolError, match="twice"):
        cluster.subserver("small").handle(cluster.links["small"].peer, hello, now_ns=0)


def test_a_step_without_room_for_a_prefill_is_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="max_num_tokens"):
        Cluster(("small",), engine={"max_num_tokens": 4, "max_batch_size": 4})


def test_shares_beyond_the_pool_are_refused_at_load() -> None:
    engine = Cluster(("small",)).subserver("small").engine
    runner = SteppingRunner(engine, Batching(), clock_ns=lambda: 0)
    shares = {"routed": engine.info.kv_blocks, "direct": 1}
    with pytest.raises(ConfigError, match="exceed the pool"):
        Subserver("small", runner, shares=shares, context=PolicyContext)


# --- visits ----------------------------------------------------------------------------------------------------------


class Elsewhere:
    """A loader that loads when the test says."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Loading, Loaded]] = []

    def __call__(self, loading: Loading, loaded: Loaded) -> None:
        self.jobs.append((loading, loaded))

    def finish(self, cluster: Cluster) -> None:
        jobs, self.jobs = self.jobs, []
        for loading, loaded in jobs:
            loaded(attempt(loading), cluster.now_ns)
        cluster.collect()


def test_who_waits_for_a_policy_holds_up_nobody_and_goes_on_when_it_is_there() -> None:
    cluster, loader = Cluster(("small",)), Elsewhere()
    cluster.subserver("small").load_with(loader)
    slow = spec("scripted", writers=[0])
    waiting = [cluster.submit(request(PROMPT, policy=slow)) for _ in range(2)]
    gone = cluster.submit(request(PROMPT, policy=slow))
    neighbour = cluster.submit(request(PROMPT, policy=spec("single")))
    cluster.deliver_all()
    cluster.cancel(gone)
    cluster.run()
    assert cluster.result(neighbour).tokens == expected_tokens(PROMPT, 8)
    assert cluster.keys() == waiting
    assert len(loader.jobs) == 1
    loader.finish(cluster)
    cluster.run()
    assert all(cluster.result(key).tokens == expected_tokens(PROMPT, 8) for key in waiting)
    again = cluster.submit(request(PROMPT, policy=slow))
    cluster.run()
    assert cluster.result(again).finish_reason == "stop"
    cluster.assert_conserved()


def test_a_policy_that_cannot_be_loaded_fails_those_that_wait_for_it() -> None:
    cluster, loader = Cluster(("small", "large")), Elsewhere()
    bad = PolicySpec(f"{__name__}:Unloadable")
    cluster.subserver("small").load_with(loader)
    key = cluster.submit(request(PROMPT, policy=bad))
    neighbour = cluster.submit(request(PROMPT))
    cluster.run()
    loader.finish(cluster)
    cluster.run()
    assert isinstance(cluster.error(key), PolicyFailed)
    assert "prepare: RuntimeError: no weights" in str(cluster.error(key))
    assert cluster.result(neighbour).tokens == expected_tokens(PROMPT, 8)
    cluster.assert_conserved()


def test_a_peer_that_leaves_takes_its_waiting_requests_along() -> None:
    cluster, loader = Cluster(("small",)), Elsewhere()
    subserver, peer = cluster.subserver("small"), cluster.links["small"].peer
    subserver.load_with(loader)
    cluster.submit(request(PROMPT, policy=spec("scripted", writers=[0])))
    cluster.deliver_all()
    subserver.disconnected(peer)
    loader.finish(cluster)
    assert subserver.open_sequences == 0
    assert not subserver.outbox


def test_a_resume_of_an_unknown_request_is_answered_with_lost() -> None:
    cluster = Cluster()
    subserver, peer = cluster.subserver("small"), cluster.links["small"].peer
    subserver.handle(peer, Resume(7, 3, 1, 5, [1]), now_ns=0)
    ((to, report),) = subserver.outbox
    assert isinstance(report, Report)
    (row,) = report.rows
    assert (to, row.request, row.visit, row.outcome) == (peer, 7, 3, Outcome.LOST)


def test_a_resume_with_a_gap_is_lost_and_its_kv_is_freed() -> None:
    cluster = Cluster()
    subserver, peer = cluster.subserver("small"), cluster.links["small"].peer
    opened = Open(7, 1, 1, [1, 2], 2, 8, Sampling(max_tokens=4), PolicySpec("single"))
    subserver.handle(peer, opened, now_ns=0)
    subserver.handle(peer, Resume(7, 3, 1, 5, [1]), now_ns=0)
    assert subserver.engine.blocks_leased == 0
    assert subserver.poll(now_ns=10**12) is None


def test_a_peer_that_leaves_frees_its_requests_and_not_those_of_others() -> None:
    cluster = Cluster()
    subserver = cluster.subserver("small")
    for peer in (50, 51):
        subserver.handle(peer, Hello(PROTOCOL_VERSION, "x", "routed", ("small",), PolicySpec("single")), now_ns=0)
        opened = Open(7, 1, 3, [1, 2], 2, 8, Sampling(max_tokens=4), PolicySpec("single"))
        subserver.handle(peer, opened, now_ns=0)
    assert (subserver.in_flight, subserver.open_sequences) == (6, 2)
    subserver.disconnected(50)
    assert (subserver.in_flight, subserver.open_sequences, subserver.engine.blocks_leased) == (3, 1, 2)
    subserver.disconnected(50)
    subserver.disconnected(51)
    assert (subserver.in_flight, subserver.open_sequences, subserver.engine.blocks_leased) == (0, 0, 0)


def test_a_state_that_a_policy_clears_does_not_come_back() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT, policy=PolicySpec("tests.unit.test_subserver:Notes")))
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]


def test_a_visit_limit_ends_the_visit_without_asking() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT, policy=PolicySpec("tests.unit.test_subserver:Limits")))
    cluster.run()
    runs = [(run.model, run.start, run.end) for run in cluster.result(key).runs]
    assert runs == [("small", 0, 2), ("large", 2, 4), ("small", 4, 6), ("large", 6, 7)]


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_hand_off_runs_only_what_the_model_has_not_seen() -> None:
    engines: dict[str, Recording] = {}

    def wrap(name: str, engine: EmulatedEngine) -> Recording:
        engines[name] = Recording(engine)
        return engines[name]

    cluster = Cluster(wrap=wrap)
    key = cluster.submit(request(PROMPT, policy=spec("scripted", writers=[0, 0, 1, 1, 1])))
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]
    # Prompt; one decode a token (the third is discarded); then the three that large wrote at once.
    assert engines["small"].steps == [[6], [1], [1], [3], [1]]
    assert engines["large"].steps == [[8], [1], [1], [1]]


def test_a_long_prompt_is_split_and_decodes_go_first() -> None:
    engines: list[Recording] = []

    def wrap(name: str, engine: EmulatedEngine) -> Recording:
        engines.append(Recording(engine))
        return engines[-1]

    cluster = Cluster(("small",), engine={"max_num_tokens": 6, "max_batch_size": 4}, wrap=wrap)
    short = cluster.submit(request([1, 2], policy=spec("single"), max_tokens=30, end_ids=()))
    cluster.deliver_all()
    cluster.step("small")
    cluster.deliver_all()
    long = cluster.submit(request(list(range(20)), policy=spec("single"), max_tokens=1))
    cluster.run()
    assert engines[0].steps[:5] == [[2], [1, 5], [1, 5], [1, 5], [1, 5]]
    assert cluster.result(long).tokens == [0]
    assert len(cluster.result(short).tokens) == 30


def test_every_step_counts_its_reason() -> None:
    cluster = Cluster(batching={"small": Batching(threshold=2, max_queue_delay_ns=5 * MS)})
    subserver = cluster.subserver("small")
    one = cluster.submit(request([1], policy=spec("single"), max_tokens=1))
    cluster.run()
    assert subserver.statistics.steps_by_reason[Reason.ALL_READY.value] == 1
    pair = [cluster.submit(request([1], policy=spec("single"), max_tokens=1)) for _ in range(2)]
    cluster.run()
    assert subserver.statistics.steps_by_reason[Reason.THRESHOLD.value] == 1
    keeps_away = spec("scripted", writers=["large"], trigger="keep")  # may come here, and so is in flight here
    elsewhere = cluster.submit(request([1], policy=keeps_away, max_tokens=1))
    late = cluster.submit(request([1], policy=spec("single"), max_tokens=1))
    cluster.deliver_all()
    assert subserver.poll(now_ns=cluster.now_ns) == WaitUntil(cluster.now_ns + 5 * MS)
    cluster.now_ns += 5 * MS
    assert cluster.step("small")
    assert subserver.statistics.steps_by_reason[Reason.DEADLINE.value] == 1
    cluster.run()
    assert all(cluster.result(key).tokens == [1] for key in (one, *pair, elsewhere, late))
    assert subserver.statistics.committed_tokens == 4


def test_the_document_shows_the_table_of_a_sequence() -> None:
    def rows(text: str) -> list[list[str]]:
        table = text[text.index("| event", text.index("| `Open`") - 400) :]
        lines = table.partition("\n\n")[0].splitlines()
        return [[cell.strip().strip("-") for cell in line.split("|")] for line in lines]

    document = Path(__file__).parents[2] / "CONTRIBUTING.md"
    assert rows(document.read_text("utf-8")) == rows(machine.__doc__ or "")
