from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cluster import END_ID, MS, Cluster, expected_tokens, request, spec, writers
from tokenrouter.batcher import Batching
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.errors import (
    ConfigError,
    DeadlineExceeded,
    ModelUnavailable,
    Overloaded,
    PolicyFailed,
    PromptTooLong,
    ProtocolError,
    RequestCancelled,
    RouterError,
)
from tokenrouter.messages import PROTOCOL_VERSION, ModelInfo, Outcome, PolicySpec, Report, ReportRow
from tokenrouter.policies.base import Destinations, Policy, RouteBatch
from tokenrouter.response import Update
from tokenrouter.rng import Stream, draw

PROMPT = [10, 20, 30, 40, 50, 60]
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
NAMES = {2: ("small", "large"), 3: ("small", "middle", "large")}


def expected_writers(policy: PolicySpec, names: tuple[str, ...], count: int, seed: int) -> list[str] | None:
    """Who has to write each of `count` tokens, straight from the policies' definitions."""
    if policy.name == "random":
        p = float(policy.params.split(":")[1].rstrip("}"))
        return [names[1] if draw(seed, i, Stream.ROUTING) < p else names[0] for i in range(count)]
    if policy.name == "scripted":
        script = json.loads(policy.params)["writers"]
        return [names[script[i % len(script)]] for i in range(count)]
    return None


# --- tokens ----------------------------------------------------------------------------------------------------------


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


def test_streamed_updates_join_to_the_result_and_others_get_one_update() -> None:
    cluster = Cluster()
    streamed = cluster.submit(request(list(b"hello you"), max_tokens=20, stream=True, log_probs=True))
    whole = cluster.submit(request(list(b"hello you"), max_tokens=20, log_probs=True))
    cluster.run()
    (single,) = cluster.updates[whole]
    deltas = cluster.updates[streamed]
    assert len(deltas) > 1
    result = cluster.result(streamed)
    assert "".join(update.text for update in deltas) == single.text == result.text
    assert [token for update in deltas for token in update.tokens] == single.tokens == result.tokens
    assert [value for update in deltas for value in update.log_probs] == single.log_probs == result.log_probs
    assert len(single.log_probs) == len(single.tokens)
    assert all(later.start == earlier.end for earlier, later in zip(single.runs, single.runs[1:], strict=False))


def test_merged_updates_say_what_the_single_ones_said() -> None:
    cluster = Cluster()
    key = cluster.submit(request(list(b"hello you"), max_tokens=20, stream=True, log_probs=True))
    cluster.run()
    updates = cluster.updates[key]
    for cut in range(1, len(updates)):
        merged = Update(key)
        for update in updates[:cut]:
            merged.merge(update)
        assert not merged.final
        for update in updates[cut:]:
            merged.merge(update)
        result = cluster.result(key)
        assert (merged.text, merged.tokens, merged.log_probs) == (result.text, result.tokens, result.log_probs)
        assert merged.result is result
        assert [run.model for run in merged.runs for _ in range(run.start, run.end)] == writers(result)


def test_a_discarded_draft_does_not_count_as_the_only_token() -> None:
    cluster = Cluster()
    key = cluster.submit(request([7, 8], max_tokens=1, policy=spec("scripted", writers=[1])))
    cluster.run()
    assert (cluster.result(key).tokens, writers(cluster.result(key))) == ([7], ["large"])


# --- random walks ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.sampled_from([2, 3]), deaths=st.booleans())
def test_nothing_is_lost_in_any_order_of_arrivals_cancels_steps_and_restarts(
    seed: int, count: int, deaths: bool
) -> None:
    """Conservation: one final update each, ledger and pools empty, tokens by the script unless cancelled."""
    rng = random.Random(seed)
    names = NAMES[count]
    cluster = Cluster(
        names,
        batching={
            name: Batching(threshold=rng.randint(1, 3), max_queue_delay_ns=rng.randrange(20 * MS)) for name in names
        },
        engine={"max_batch_size": rng.randint(1, 4), "max_num_tokens": rng.randint(5, 9)},
        kv_tokens={name: rng.choice([40, 400]) for name in names},
        max_inflight=rng.randint(1, 6),
        connect_timeout_ns=10**15,
    )
    submitted: dict[int, tuple[list[int], int]] = {}
    cancelled: set[int] = set()
    dead: set[str] = set()
    for _ in range(400):
        chance = rng.random()
        if chance < 0.06 and len(submitted) < 12:
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
            max_tokens = rng.randint(1, 12)
            trigger = rng.choice(["keep", "discard"])
            script = spec("scripted", writers=[rng.randrange(count) for _ in range(4)], trigger=trigger)
            stream = rng.random() < 0.5
            key = cluster.submit(request(prompt, max_tokens=max_tokens, policy=script, stream=stream))
            submitted[key] = (prompt, max_tokens)
        elif chance < 0.08 and submitted:
            key = rng.choice(list(submitted))
            cancelled.add(key)
            cluster.cancel(key)
        elif deaths and chance < 0.10:
            name = rng.choice(names)
            (cluster.connect if name in dead else cluster.kill)(name)
            dead ^= {name}
        else:
            cluster.random_event(rng)
    for name in dead:
        cluster.connect(name)
    cluster.walk(rng)
    cluster.deliver_all()
    cluster.assert_conserved()
    for key, (prompt, max_tokens) in submitted.items():
        error = cluster.updates[key][-1].error
        if error is not None:
            assert isinstance(error, RequestCancelled)
            assert key in cancelled
        else:
            assert cluster.result(key).tokens == expected_tokens(prompt, max_tokens)


def test_a_request_that_comes_while_a_turn_works_has_not_waited_less_than_nothing() -> None:
    cluster = Cluster(("small", "large"))
    now_ns = cluster.now_ns
    cluster.orchestrator.submit(request(PROMPT, max_tokens=4), now_ns=now_ns, arrived_ns=now_ns + MS)
    assert cluster.orchestrator.statistics.queue_wait.count == 1
    assert cluster.orchestrator.statistics.queue_wait.total == 0.0


def test_every_model_learns_the_number_in_flight() -> None:
    rng = random.Random(3)
    cluster = Cluster(NAMES[3], max_inflight=5)
    keys = [cluster.submit(request(PROMPT, policy=spec("single", model="middle"))) for _ in range(4)]
    cluster.deliver_all()
    assert [cluster.subserver(name).in_flight for name in NAMES[3]] == [4, 4, 4]
    cluster.cancel(keys[0])
    cluster.deliver_all()
    assert [cluster.subserver(name).in_flight for name in NAMES[3]] == [3, 3, 3]
    cluster.walk(rng)
    cluster.deliver_all()
    assert [cluster.subserver(name).in_flight for name in NAMES[3]] == [0, 0, 0]


def test_a_restarted_model_learns_the_number_in_flight() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.submit(request(PROMPT, policy=spec("single")))
    cluster.deliver_all()
    cluster.kill("large")
    cluster.connect("large")
    cluster.deliver_all()
    assert cluster.subserver("large").in_flight == 3


# --- cancel ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("state", ["queued", "open-on-the-wire", "resident-on-small", "resume-on-the-wire-to-small"])
def test_a_cancelled_request_ends_once_and_frees_everything(state: str) -> None:
    _cancel_in(state)


@pytest.mark.parametrize("state", ["handoff-on-the-wire", "resident-on-large", "report-on-the-wire-from-large"])
def test_a_request_cancelled_beyond_a_hand_off_frees_both_models(state: str) -> None:
    _cancel_in(state)


def _cancel_in(state: str) -> None:
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


# --- restarts --------------------------------------------------------------------------------------------------------


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


def test_a_stranded_request_fails_after_the_limit_and_names_the_model() -> None:
    cluster = Cluster(connect_timeout_ns=500 * MS)
    stranded = cluster.submit(request(PROMPT, policy=spec("single", model="large")))
    cluster.deliver_all()
    cluster.kill("large")
    lost_ns = cluster.now_ns
    waiting = cluster.submit(request(PROMPT, policy=spec("single", model="large")))
    assert cluster.orchestrator.next_deadline_ns() == lost_ns + 500 * MS
    cluster.tick(at_ns=lost_ns + 500 * MS - 1)
    assert set(cluster.keys()) == {stranded, waiting}
    cluster.tick(at_ns=lost_ns + 500 * MS)
    for key in (stranded, waiting):
        error = cluster.error(key)
        assert isinstance(error, ModelUnavailable)
        assert "'large'" in str(error)
    cluster.deliver_all()
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


def test_a_waiting_request_gives_a_lost_model_the_whole_limit_to_come_back() -> None:
    cluster = Cluster(max_inflight=1, connect_timeout_ns=500 * MS)
    cluster.submit(request(PROMPT, policy=spec("single")))
    waiting = cluster.submit(request(PROMPT, policy=spec("single", model="large")))
    cluster.tick(at_ns=cluster.now_ns + 10_000 * MS)
    cluster.kill("large")
    lost_ns = cluster.now_ns
    cluster.tick(at_ns=lost_ns + 500 * MS - 1)
    assert waiting in cluster.keys()  # noqa: SIM118
    cluster.tick(at_ns=lost_ns + 500 * MS)
    assert isinstance(cluster.error(waiting), ModelUnavailable)


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


@pytest.mark.parametrize(
    ("info", "error", "says"),
    [
        pytest.param({"version": PROTOCOL_VERSION + 1}, ProtocolError, "version", id="another-protocol-version"),
        pytest.param({"model": "other"}, ConfigError, "'other' answered", id="another-model"),
    ],
)
def test_a_wrong_model_on_the_channel_is_refused(info: dict[str, Any], error: type[Exception], says: str) -> None:
    cluster = Cluster(connect=False)
    facts = {"version": PROTOCOL_VERSION, "model": "small", "engine": "x", "emulated": True, "vocab_size": 9}
    facts |= {"max_context": 9, "block_tokens": 1, "kv_blocks": 9, **info}
    with pytest.raises(error, match=says):
        cluster.orchestrator.receive("small", ModelInfo(**facts), now_ns=0)


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_a_running_request_ends_at_its_deadline_with_what_it_has() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT, policy=spec("single"), timeout_ns=100 * MS))
    arrived_ns = cluster.now_ns
    cluster.deliver_all()
    cluster.step("small")
    cluster.deliver_all()
    cluster.tick(at_ns=arrived_ns + 100 * MS - 1)
    assert cluster.keys() == [key]
    assert cluster.orchestrator.next_deadline_ns() == arrived_ns + 100 * MS
    cluster.tick(at_ns=arrived_ns + 100 * MS)
    assert (cluster.result(key).finish_reason, cluster.result(key).tokens) == ("timeout", PROMPT[:1])
    cluster.run()
    cluster.assert_conserved()


def test_a_deadline_counts_from_the_arrival_not_from_the_start() -> None:
    cluster = Cluster(max_inflight=1)
    first = cluster.submit(request(PROMPT, policy=spec("single"), timeout_ns=10 * MS))
    second = cluster.submit(request(PROMPT, policy=spec("single"), timeout_ns=15 * MS))
    arrived_ns = cluster.now_ns
    cluster.tick(at_ns=arrived_ns + 10 * MS)
    assert cluster.result(first).finish_reason == "timeout"
    assert cluster.orchestrator.in_flight == 1
    cluster.tick(at_ns=arrived_ns + 15 * MS)
    assert cluster.result(second).finish_reason == "timeout"


def test_a_request_that_waits_too_long_is_refused_on_time_while_others_run() -> None:
    cluster = Cluster(max_inflight=1, queue=EntryQueuePolicy(default_timeout_ns=500 * MS))
    running = cluster.submit(request(PROMPT, policy=spec("single")))
    waiting = cluster.submit(request(PROMPT, policy=spec("single")))
    arrived_ns = cluster.now_ns
    cluster.tick(at_ns=arrived_ns + 500 * MS - 1)
    assert set(cluster.keys()) == {running, waiting}
    assert cluster.orchestrator.next_deadline_ns() == arrived_ns + 500 * MS
    cluster.tick(at_ns=arrived_ns + 500 * MS)
    assert isinstance(cluster.error(waiting), DeadlineExceeded)
    assert cluster.orchestrator.queued == 0
    cluster.run()
    assert cluster.result(running).tokens == [*PROMPT, END_ID]


def test_a_delayed_request_still_has_its_own_deadline() -> None:
    queue = EntryQueuePolicy(default_timeout_ns=100 * MS, reject=False)
    cluster = Cluster(max_inflight=1, queue=queue)
    cluster.submit(request(PROMPT, policy=spec("single")))
    late = cluster.submit(request(PROMPT, policy=spec("single"), timeout_ns=300 * MS))
    arrived_ns = cluster.now_ns
    cluster.tick(at_ns=arrived_ns + 100 * MS)
    assert cluster.orchestrator.queued == 1
    assert cluster.orchestrator.next_deadline_ns() == arrived_ns + 300 * MS, "nobody would look at it in time"
    cluster.tick(at_ns=arrived_ns + 300 * MS)
    assert isinstance(cluster.error(late), DeadlineExceeded)


def test_a_delayed_request_is_served_after_all_others() -> None:
    cluster = Cluster(max_inflight=1, queue=EntryQueuePolicy(default_timeout_ns=100 * MS, reject=False))
    keys = [cluster.submit(request(PROMPT, policy=spec("single"))) for _ in range(2)]
    cluster.tick(at_ns=cluster.now_ns + 100 * MS)
    keys.append(cluster.submit(request(PROMPT, policy=spec("single"))))
    cluster.run()
    started = [cluster.result(key).last_token_ns for key in keys]
    order = [key for key in cluster.updates if cluster.result(key)]
    assert order == keys
    assert started[0] <= started[2] <= started[1]


# --- admission -------------------------------------------------------------------------------------------------------


def test_no_more_than_max_inflight_run_at_once_and_all_are_served_in_order() -> None:
    cluster = Cluster(max_inflight=2)
    keys = [cluster.submit(request(PROMPT, policy=spec("single"), max_tokens=1 + i)) for i in range(6)]
    assert (cluster.orchestrator.in_flight, cluster.orchestrator.queued) == (2, 4)
    starts = []
    while cluster.keys():
        assert cluster.orchestrator.in_flight <= 2
        cluster.deliver_all()
        cluster.now_ns += MS
        cluster.step("small")
    starts = [cluster.result(key).started_ns for key in keys]
    assert starts == sorted(starts)
    cluster.deliver_all()
    cluster.assert_conserved()


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    cluster = Cluster(max_inflight=1, queue=EntryQueuePolicy(max_queue_size=1))
    cluster.submit(request(PROMPT))
    cluster.submit(request(PROMPT))
    with pytest.raises(Overloaded, match="max_queue_size 1"):
        cluster.submit(request(PROMPT))
    cluster.run()
    cluster.assert_conserved()


@pytest.mark.parametrize(
    ("kv_tokens", "engine", "says"),
    [
        pytest.param({"small": 40}, {}, r"'small' holds 40 tokens \(10 blocks of 4\)", id="kv-of-small"),
        pytest.param({"large": 40}, {}, r"'large' holds 40 tokens \(10 blocks of 4\)", id="kv-of-large"),
        pytest.param({}, {"max_seq_len": 40}, "model 'small' has a context of 40 tokens", id="context"),
    ],
)
def test_what_can_never_fit_is_refused_at_once_and_the_others_run(
    kv_tokens: dict[str, int], engine: dict[str, Any], says: str
) -> None:
    cluster = Cluster(kv_tokens=kv_tokens, engine=engine)
    with pytest.raises(PromptTooLong, match=says):
        cluster.submit(request(PROMPT, max_tokens=35))
    keys = [cluster.submit(request(PROMPT, max_tokens=34)) for _ in range(5)]
    cluster.run()
    assert all(cluster.result(key).tokens == [*PROMPT, END_ID] for key in keys)
    cluster.assert_conserved()


def test_only_models_that_a_policy_visits_have_to_hold_the_request() -> None:
    cluster = Cluster(kv_tokens={"large": 8})
    key = cluster.submit(request(PROMPT, max_tokens=20, policy=spec("single")))
    assert cluster.orchestrator.reserved_blocks("large") == 0
    cluster.run()
    assert cluster.result(key).tokens == [*PROMPT, END_ID]


def test_a_request_waits_for_kv_in_order_and_is_not_overtaken() -> None:
    cluster = Cluster(kv_tokens={"small": 40, "large": 4096})
    first = cluster.submit(request(PROMPT, max_tokens=20, policy=spec("single")))
    big = cluster.submit(request(PROMPT, max_tokens=30, policy=spec("single")))
    small = cluster.submit(request([1], max_tokens=2, policy=spec("single")))
    assert (cluster.orchestrator.in_flight, cluster.orchestrator.queued) == (1, 2)
    while cluster.keys():
        cluster.deliver_all()
        cluster.now_ns += MS
        cluster.step("small")
        assert cluster.orchestrator.reserved_blocks("small") <= 10
    starts = [cluster.result(key).started_ns for key in (first, big, small)]
    assert starts == sorted(starts)


def test_a_model_that_connects_with_too_small_a_pool_does_not_starve_the_queue() -> None:
    cluster = Cluster(kv_tokens={"large": 16}, connect=False)
    cluster.connect("small")
    cluster.deliver_all()
    never = cluster.submit(request(PROMPT, max_tokens=30))
    fine = cluster.submit(request([1, 2], max_tokens=4))
    cluster.connect("large")
    cluster.run()
    assert isinstance(cluster.error(never), PromptTooLong)
    assert "'large'" in str(cluster.error(never))
    assert cluster.result(fine).tokens == [1, 2, END_ID]
    cluster.assert_conserved()


def test_a_waiting_request_that_is_cancelled_lets_the_next_one_start() -> None:
    cluster = Cluster(kv_tokens={"small": 40, "large": 4096})
    cluster.submit(request(PROMPT, max_tokens=20, policy=spec("single")))
    big = cluster.submit(request(PROMPT, max_tokens=30, policy=spec("single")))
    cluster.submit(request([1], max_tokens=2, policy=spec("single")))
    cluster.cancel(big)
    assert (cluster.orchestrator.in_flight, cluster.orchestrator.queued) == (2, 0)


# --- policies that go wrong ------------------------------------------------------------------------------------------

FAULTS = [
    ("visited", "raises"),
    ("visited", "refuses"),
    ("visited", "returns_none"),
    ("visited", "returns_unknown_model"),
    ("entry", "raises"),
    ("entry", "refuses"),
    ("entry", "returns_none"),
    ("entry", "returns_nowhere"),
    ("mask", "raises"),
    ("mask", "refuses"),
    ("mask", "returns_none"),
    ("mask", "returns_ids_out_of_range"),
    ("mask", "returns_text_ids"),
    ("receive", "raises"),
    ("receive", "refuses"),
    ("receive", "returns_none"),
    ("receive", "returns_unknown_limit"),
    ("receive", "returns_zero_limit"),
    ("route", "raises"),
    ("route", "refuses"),
    ("route", "returns_none"),
    ("route", "returns_unknown_model"),
    ("route", "returns_unknown_index"),
    ("route", "returns_too_few"),
    ("send", "raises"),
    ("send", "refuses"),
    ("send", "returns_none"),
    ("send", "returns_foreign_state"),
    ("send", "returns_big_number"),
]


@pytest.mark.parametrize(("method", "fault"), FAULTS)
@pytest.mark.parametrize("position", [0, 2])
def test_a_faulty_policy_fails_only_its_own_requests(method: str, fault: str, position: int) -> None:
    healthy = [spec("single"), spec("scripted", writers=[0, 1]), spec("random", p=0.5)]
    cluster = Cluster()
    faulty = spec("tests.unit.faulty_policies:Faulty", method=method, fault=fault, position=position)
    before = [cluster.submit(request(PROMPT, policy=policy)) for policy in healthy]
    try:
        victim = cluster.submit(request(PROMPT, policy=faulty, stream=True))
    except RouterError as exc:
        error = exc
    else:
        after = cluster.submit(request(PROMPT, policy=spec("scripted", writers=[1, 0])))
        cluster.run()
        error = cluster.error(victim)
        assert cluster.result(after).tokens == [*PROMPT, END_ID]
    cluster.run()
    if fault == "refuses":
        assert "boom" in str(error)  # a policy may refuse a request in its own words
    else:
        assert isinstance(error, PolicyFailed)
        assert "faulty" in str(error).lower()
        assert method in str(error)
    assert [cluster.result(key).tokens for key in before] == [[*PROMPT, END_ID]] * len(healthy)
    cluster.assert_conserved()


def test_a_hand_off_to_a_model_without_a_reservation_fails_that_request() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT, policy=PolicySpec("tests.unit.test_orchestrator:Stray")))
    cluster.run()
    assert isinstance(cluster.error(key), PolicyFailed)
    assert "not among the models it visits" in str(cluster.error(key))
    cluster.assert_conserved()


def test_a_policy_under_which_nobody_keeps_a_token_is_stopped() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT, policy=PolicySpec("tests.unit.faulty_policies:PingPong")))
    neighbour = cluster.submit(request(PROMPT))
    cluster.run(limit=200)
    assert isinstance(cluster.error(key), PolicyFailed)
    assert "no model kept a token" in str(cluster.error(key))
    assert cluster.result(neighbour).tokens == [*PROMPT, END_ID]
    cluster.assert_conserved()


class Stray(Policy):
    """Leaves to a model that it does not list."""

    name = "stray"

    def visited(self) -> tuple[str, ...]:
        return ("small",)

    def route(self, batch: RouteBatch) -> Destinations:
        return ["large"] * len(batch)
