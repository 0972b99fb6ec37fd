from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.repositories import END_ID
from tests.unit.cluster import NAMES, Cluster, model_info
from tests.unit.emulated_requests import MS, PROMPT, expected_tokens, request, spec, writers
from tokenrouter.batcher import Batching
from tokenrouter.errors import ConfigError, ModelUnavailable, ProtocolError, RequestCancelled
from tokenrouter.messages import Outcome, PolicySpec, Report, ReportRow
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.rng import Stream, draw

ROUTINGS = [
    pytest.param(2, spec("single"), id="one-model"),
    pytest.param(2, spec("single", model="large"), id="large-only"),
    pytest.param(2, spec("scripted", writers=[0, 1]), id="alternating-discard"),
    pytest.param(2, spec("scripted", writers=[0, 1], trigger="keep"), id="alternating-keep"),
    pytest.param(2, spec("scripted", writers=[1, 1, 0]), id="large-first-discard"),
    pytest.param(2, spec("random", p=0.0), id="random-never"),
    pytest.param(2, spec("random", p=0.4), id="random-sometimes"),
    pytest.param(2, spec("random", p=1.0), id="random-always"),
    pytest.param(3, spec("scripted", writers=[0, 1, 2, 1]), id="three-models-discard"),
    pytest.param(3, spec("scripted", writers=[2, 0, 1, 1], trigger="keep"), id="three-models-keep"),
    pytest.param(2, PolicySpec("tests.unit.faulty_policies:Stateful"), id="state-travels"),
]


def expected_writers(policy: PolicySpec, names: tuple[str, ...], count: int, seed: int) -> list[str] | None:
    """Who has to write each of `count` tokens, straight from the policies' definitions."""
    if policy.name == "random":
        p = float(policy.params.split(":")[1].rstrip("}"))
        return [names[1] if draw(seed, i, Stream.ROUTING) < p else names[0] for i in range(count)]
    if policy.name == "scripted":
        script = json.loads(policy.params)["writers"]
        return [names[script[i % len(script)]] for i in range(count)]
    return None


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "policy"), ROUTINGS)
@pytest.mark.parametrize("max_tokens", [1, 2, 6, 7, 30])
def test_the_tokens_are_those_of_one_model_whoever_writes(count: int, policy: PolicySpec, max_tokens: int) -> None:
    cluster = Cluster(NAMES[count])
    key = cluster.submit(request(PROMPT, max_tokens=max_tokens, policy=policy, seed=5))
    cluster.run()
    result = cluster.result(key)
    want = expected_tokens(PROMPT, max_tokens)
    assert result.tokens == want
    assert result.finish_reason == ("stop" if want[-1] == END_ID else "length")
    script = expected_writers(policy, NAMES[count], len(want), 5)
    assert script is None or writers(result) == script
    assert sum(result.tokens_by_model.values()) == len(want)
    assert result.handoffs >= len(result.runs) - 1
    cluster.assert_conserved()


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_the_tokens_do_not_depend_on_routing_thresholds_company_or_order(temperature: float) -> None:
    alone: dict[int, list[int]] = {}
    for seed in range(6):
        cluster = Cluster(("small",), engine={"margin": 2.0})
        key = cluster.submit(request(PROMPT, policy=spec("single"), seed=seed, temperature=temperature))
        cluster.run()
        alone[seed] = cluster.result(key).tokens
    assert temperature == 0.0 or len(set(map(tuple, alone.values()))) > 1, "seeds have no effect"
    for trial in range(12):
        rng = random.Random(trial)
        policies = {
            name: Batching(threshold=rng.randint(1, 4), max_queue_delay_ns=rng.choice([0, MS, 50 * MS]))
            for name in ("small", "large")
        }
        engine = {"margin": 2.0, "max_batch_size": rng.randint(1, 5), "max_num_tokens": rng.randint(6, 12)}
        cluster = Cluster(batching=policies, engine=engine, max_inflight=rng.randint(1, 8))
        keys = {}
        for seed in rng.sample(range(6), 6):
            policy = rng.choice([spec("scripted", writers=[0, 1]), spec("random", p=0.5), spec("single")])
            keys[cluster.submit(request(PROMPT, policy=policy, seed=seed, temperature=temperature))] = seed
        cluster.walk(rng)
        assert {seed: cluster.result(key).tokens for key, seed in keys.items()} == alone
        cluster.assert_conserved()


def test_a_discarded_draft_does_not_count_as_the_only_token() -> None:
    cluster = Cluster()
    key = cluster.submit(request([7, 8], max_tokens=1, policy=spec("scripted", writers=[1])))
    cluster.run()
    assert (cluster.result(key).tokens, writers(cluster.result(key))) == ([7], ["large"])


# --- the number in flight ---------------------------------------------------------------------------------------------


def test_every_model_learns_the_number_in_flight_that_may_come_to_it() -> None:
    rng = random.Random(3)
    cluster = Cluster(NAMES[3], max_inflight=5)
    keys = [cluster.submit(request(PROMPT, policy=spec("scripted", writers=[0, 1, 2]))) for _ in range(4)]
    cluster.submit(request(PROMPT, policy=spec("single", model="middle")))
    cluster.deliver_all()
    assert [cluster.subserver(name).in_flight for name in NAMES[3]] == [4, 5, 4]
    cluster.cancel(keys[0])
    cluster.deliver_all()
    assert [cluster.subserver(name).in_flight for name in NAMES[3]] == [3, 4, 3]
    cluster.walk(rng)
    cluster.deliver_all()
    assert [cluster.subserver(name).in_flight for name in NAMES[3]] == [0, 0, 0]


def test_a_restarted_model_learns_the_number_in_flight() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.submit(request(PROMPT))
    cluster.deliver_all()
    cluster.kill("large")
    cluster.connect("large")
    cluster.deliver_all()
    assert cluster.subserver("large").in_flight == 3


# --- cancel -----------------------------------------------------------------------------------------------------------


def _until_at(cluster: Cluster, model: str, *, delivered: bool) -> None:
    """Runs the newest request until a hand-off to `model` is on the wire, or was delivered."""
    while cluster.deliver_down(model):
        pass
    (other,) = (name for name in cluster.models if name != model)
    for _ in range(100):
        if cluster.links[model].down:
            if delivered:
                cluster.deliver_down(model)
            return
        assert cluster.deliver_down(other) or cluster.deliver_up(other) or cluster.step(other)
    raise AssertionError(f"never handed over to {model}")


@pytest.mark.parametrize(
    "state",
    [
        "queued",
        "open-on-the-wire",
        "resident-on-small",
        "resume-on-the-wire-to-small",
        "handoff-on-the-wire",
        "resident-on-large",
        "report-on-the-wire-from-large",
    ],
)
def test_a_cancelled_request_ends_once_and_frees_everything_wherever_it_is(state: str) -> None:
    cluster = Cluster(max_inflight=1 if state == "queued" else 8)
    neighbour = cluster.submit(request(PROMPT, policy=spec("single"), max_tokens=6))
    if state != "queued":
        cluster.run()
    victim = cluster.submit(request(PROMPT, max_tokens=6, stream=True))
    if state == "open-on-the-wire":
        assert cluster.links["small"].down
    elif state == "resident-on-small":
        cluster.deliver_down("small")
        assert cluster.subserver("small").residents == 1
    elif state == "handoff-on-the-wire":
        _until_at(cluster, "large", delivered=False)
    elif state in ("resident-on-large", "report-on-the-wire-from-large"):
        _until_at(cluster, "large", delivered=True)
        assert cluster.subserver("large").residents == 1
        assert cluster.subserver("small").open_sequences == 1
        if state.startswith("report"):
            assert cluster.step("large")
    elif state == "resume-on-the-wire-to-small":
        _until_at(cluster, "large", delivered=True)
        while not cluster.links["small"].down:
            assert cluster.step("large") or cluster.deliver_up("large")
    cluster.cancel(victim)
    assert isinstance(cluster.error(victim), RequestCancelled)
    cluster.cancel(victim)
    cluster.run()
    assert cluster.result(neighbour).tokens == PROMPT
    cluster.assert_conserved()
    assert cluster.orchestrator.statistics.failed == {"cancelled": 1}
    if state.startswith("report"):
        assert cluster.orchestrator.statistics.stale_messages == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_ends_all_responses_with_an_error_and_takes_no_more(stream: bool) -> None:
    cluster = Cluster(max_inflight=1, engine={"repeat": True})
    running = cluster.submit(request(PROMPT, max_tokens=500, stream=stream))
    waiting = cluster.submit(request(PROMPT, stream=stream))
    for _ in range(20):
        cluster.deliver_all()
        cluster.step("small") or cluster.step("large")
    deadline_ns = cluster.now_ns + 50 * MS
    cluster.stop_at(deadline_ns)
    assert cluster.orchestrator.next_deadline_ns() == deadline_ns
    cluster.tick(at_ns=deadline_ns - 1)
    assert cluster.keys() == [running, waiting]
    cluster.tick(at_ns=deadline_ns)
    for key in (running, waiting):
        assert isinstance(cluster.error(key), ModelUnavailable)
        assert "the server is stopping" in str(cluster.error(key))
    with pytest.raises(ModelUnavailable, match="the server is stopping"):
        cluster.submit(request(PROMPT))
    cluster.deliver_all()
    cluster.assert_conserved()


def test_a_server_that_stops_takes_requests_until_its_deadline() -> None:
    cluster = Cluster()
    cluster.stop_at(cluster.now_ns + 10_000 * MS)
    key = cluster.submit(request(PROMPT))
    cluster.run()
    assert cluster.result(key).finish_reason == "stop"


def test_messages_of_an_old_visit_are_dropped_and_counted() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT))
    cluster.deliver_all()
    old = Report(0, [ReportRow(key, 0, Outcome.STAY, [1])])
    elsewhere = Report(0, [ReportRow(key, 1, Outcome.STAY, [1])])
    unknown = Report(0, [ReportRow(99, 1, Outcome.STAY, [1])])
    for model, report in (("small", old), ("large", elsewhere), ("small", unknown)):
        cluster.orchestrator.receive(model, report, now_ns=cluster.now_ns)
    assert cluster.orchestrator.statistics.stale_messages == 3
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]


def test_equal_requests_are_told_apart() -> None:
    cluster = Cluster()
    keys = [cluster.submit(request(PROMPT)) for _ in range(3)]
    assert len(set(keys)) == 3
    cluster.cancel(keys[1])
    cluster.run()
    assert cluster.result(keys[0]).tokens == cluster.result(keys[2]).tokens == [*PROMPT, END_ID]
    assert isinstance(cluster.error(keys[1]), RequestCancelled)


# --- restarts and hand-offs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("events", range(1, 30, 2))
def test_a_restart_at_any_moment_changes_no_token(name: str, events: int) -> None:
    rng = random.Random(events)
    cluster = Cluster(batching={"large": Batching(2, 3 * MS)}, connect_timeout_ns=10**15)
    keys = [cluster.submit(request(PROMPT, stream=i == 0)) for i in range(3)]
    for _ in range(events):
        cluster.random_event(rng)
    cluster.kill(name)
    for _ in range(5):
        cluster.random_event(rng)
    cluster.connect(name)
    cluster.walk(rng)
    assert [cluster.result(key).tokens for key in keys] == [[*PROMPT, END_ID]] * 3
    assert [token for update in cluster.updates[keys[0]] for token in update.tokens] == [*PROMPT, END_ID]
    cluster.assert_conserved()


def test_a_model_that_lost_a_request_is_sent_the_whole_history() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT))
    _until_at(cluster, "large", delivered=True)
    while not cluster.links["small"].down:
        assert cluster.step("large") or cluster.deliver_up("large")
    cluster.evict("small", key)
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]
    assert cluster.orchestrator.statistics.recovered == 1
    cluster.assert_conserved()


def test_what_a_lost_model_said_last_comes_too_late_once_it_is_gone() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT, policy=spec("single")))
    cluster.deliver_all()
    cluster.kill("small")
    late = Report(0, [ReportRow(key, 1, Outcome.STAY, [99])])
    cluster.orchestrator.receive("small", late, now_ns=cluster.now_ns)
    assert cluster.orchestrator.statistics.stale_messages == 1
    cluster.connect("small")
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]


def test_the_example_of_the_machines_text() -> None:
    orchestrator = Cluster().orchestrator
    key = orchestrator.submit(request([5, 6], stream=True), now_ns=0)

    def sent() -> list[tuple[str, str, int | None, list[int] | None]]:
        """What went out: to whom, which message, its first position if it has one, and its tokens."""
        out = [
            (model, type(message).__name__, getattr(message, "start", None), getattr(message, "tokens", None))
            for model, message in orchestrator.outbox
        ]
        orchestrator.outbox.clear()
        return [each for each in out if each[1] != "InFlight"]

    def report(model: str, visit: int, outcome: Outcome, tokens: list[int], target: str = "") -> None:
        orchestrator.receive(model, Report(0, [ReportRow(key, visit, outcome, tokens, target)]), now_ns=0)

    assert sent() == [("small", "Open", None, [5, 6])]
    report("small", 1, Outcome.STAY, [9])
    assert sent() == []
    report("small", 1, Outcome.LEAVE, [], "large")
    assert sent() == [("large", "Open", None, [5, 6, 9])]
    orchestrator.disconnected("large", now_ns=0)
    assert sent() == []
    orchestrator.receive("large", model_info("large"), now_ns=0)
    assert sent() == [("large", "Open", None, [5, 6, 9])]
    report("large", 3, Outcome.LEAVE, [8], "small")
    assert sent() == [("small", "Resume", 3, [8])]
    report("small", 4, Outcome.STOP, [2])
    assert sent() == [("small", "Close", None, None), ("large", "Close", None, None)]
    assert orchestrator.reserved_blocks("small") == orchestrator.reserved_blocks("large") == 0
    updates = orchestrator.take_updates()
    assert [update.tokens for update in updates] == [[9], [8], [2]]
    assert updates[-1].result is not None


def test_a_hand_off_to_an_absent_model_waits_for_it() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT))
    cluster.deliver_all()
    cluster.kill("large")
    cluster.step("small")
    cluster.deliver_all()
    cluster.step("small")
    cluster.deliver_all()
    assert not any(cluster.step(name) for name in cluster.models)
    cluster.connect("large")
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]


# --- peers that break the protocol ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "error", "says"),
    [
        pytest.param({"version": PROTOCOL_VERSION + 1}, ProtocolError, "version", id="another-protocol-version"),
        pytest.param({"model": "other"}, ConfigError, "'other' answered", id="another-model"),
    ],
)
def test_a_wrong_model_on_the_channel_is_refused(info: dict[str, Any], error: type[Exception], says: str) -> None:
    cluster = Cluster(connect=False)
    with pytest.raises(error, match=says):
        cluster.orchestrator.receive("small", model_info("small", **info), now_ns=0)
