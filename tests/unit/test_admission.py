"""Who may run, who waits, who has waited too long."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.repositories import END_ID, VOCAB_SIZE
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import MS, PROMPT, TOKENIZER, request, spec
from tokenrouter.entry_queue import EntryQueuePolicy, Priorities
from tokenrouter.errors import DeadlineExceeded, InvalidRequest, ModelUnavailable, Overloaded, PromptTooLong
from tokenrouter.messages import ModelInfo
from tokenrouter.orchestrator.admission import Admission
from tokenrouter.orchestrator.generation import Generation
from tokenrouter.orchestrator.transcript import Transcript
from tokenrouter.policies.base import Policy, PolicyContext, PolicyParams
from tokenrouter.protocol_version import PROTOCOL_VERSION


def model_info(name: str, block_tokens: int, kv_blocks: int) -> ModelInfo:
    return ModelInfo(PROTOCOL_VERSION, name, "x", True, VOCAB_SIZE, 1000, block_tokens, kv_blocks)


def generation(key: int, prompt_tokens: int, max_tokens: int) -> Generation:
    what = request([1] * prompt_tokens, max_tokens=max_tokens)
    policy = Policy(PolicyParams(), PolicyContext(("small", "large")))
    return Generation(key, what, policy, 0, Transcript(key, what, TOKENIZER))


# --- KV and the number in flight --------------------------------------------------------------------------------------


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
    ("kv_tokens", "per_model", "says"),
    [
        pytest.param({}, {"small": 40, "large": 30}, "model 'large' has a context of 30 tokens", id="contexts"),
        pytest.param({"large": 20}, {"small": 40}, "pool of model 'large' holds 20 tokens", id="context-and-kv"),
        pytest.param({"small": 16, "large": 20}, {}, "pool of model 'small' holds 16 tokens", id="kv"),
    ],
)
def test_what_is_over_several_limits_is_refused_with_the_smallest(
    kv_tokens: dict[str, int], per_model: dict[str, int], says: str
) -> None:
    cluster = Cluster(kv_tokens=kv_tokens, per_model={name: {"max_seq_len": n} for name, n in per_model.items()})
    with pytest.raises(PromptTooLong, match=says):
        cluster.submit(request(PROMPT, max_tokens=80))


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


def test_priorities_decide_who_starts_next() -> None:
    cluster = Cluster(max_inflight=1, priorities=Priorities(levels=2, default=2))
    running = cluster.submit(request(PROMPT))
    later = [cluster.submit(request(PROMPT, priority=2)) for _ in range(3)]
    default = cluster.submit(request(PROMPT))
    first = cluster.submit(request(PROMPT, priority=1))
    with pytest.raises(InvalidRequest, match=r"priority is 3; it lies in 1..2"):
        cluster.submit(request(PROMPT, priority=3))
    while cluster.keys():
        cluster.deliver_all()
        cluster.now_ns += MS
        for name in cluster.models:
            cluster.step(name)
    order = [running, first, *later, default]
    assert sorted(order, key=lambda key: cluster.result(key).started_ns) == order
    cluster.deliver_all()
    cluster.assert_conserved()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own_ms", [None, 5000])
def test_nothing_runs_longer_than_the_deployment_allows(own_ms: int | None, stream: bool) -> None:
    cluster = Cluster(max_inflight=1, max_request_ns=1000 * MS, engine={"repeat": True})
    timeout_ns = None if own_ms is None else own_ms * MS
    running = cluster.submit(request(PROMPT, max_tokens=1000, stream=stream, timeout_ns=timeout_ns))
    cluster.now_ns += MS
    waiting = cluster.submit(request(PROMPT, max_tokens=1000))
    for _ in range(9):
        cluster.deliver_all()
        cluster.step("small") or cluster.step("large")
    began_ns = cluster.now_ns - MS
    cluster.tick(at_ns=began_ns + 1000 * MS - 1)
    assert cluster.keys() == [running, waiting]
    cluster.tick(at_ns=began_ns + 1000 * MS)
    assert isinstance(cluster.error(running), DeadlineExceeded)
    assert "ends requests after 1 s (max_request_seconds); lower max_tokens" in str(cluster.error(running))
    cluster.tick(at_ns=began_ns + 1001 * MS)
    assert isinstance(cluster.error(waiting), DeadlineExceeded)
    cluster.deliver_all()
    cluster.assert_conserved()


def test_an_own_limit_below_the_deployments_keeps_what_was_written() -> None:
    cluster = Cluster(max_request_ns=1000 * MS, engine={"repeat": True})
    key = cluster.submit(request(PROMPT, max_tokens=1000, timeout_ns=300 * MS))
    cluster.deliver_all()
    cluster.tick(at_ns=cluster.now_ns + 300 * MS)
    assert cluster.result(key).finish_reason == "timeout"


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


def test_a_request_that_comes_while_a_turn_works_has_not_waited_less_than_nothing() -> None:
    cluster = Cluster(("small", "large"))
    now_ns = cluster.now_ns
    cluster.orchestrator.submit(request(PROMPT, max_tokens=4), now_ns=now_ns, arrived_ns=now_ns + MS)
    assert cluster.orchestrator.statistics.queue_wait.count == 1
    assert cluster.orchestrator.statistics.queue_wait.total == 0.0


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=12),
    ends=st.randoms(use_true_random=False),
    max_inflight=st.integers(1, 4),
)
def test_the_ledger_is_the_sum_of_those_that_run_and_they_start_in_order(
    sizes: list[tuple[int, int]], ends: random.Random, max_inflight: int
) -> None:
    infos = {"small": model_info("small", block_tokens=4, kv_blocks=12), "large": model_info("large", 3, 20)}
    replicas = {name: (name,) for name in infos}
    admission = Admission(replicas, max_inflight=max_inflight, connect_timeout_ns=1, queue=EntryQueuePolicy())
    for name, info in infos.items():
        admission.replicas.connected(name, info)
    waiting = [generation(i, prompt, limit) for i, (prompt, limit) in enumerate(sizes)]
    for each in waiting:
        assert admission.misfit(each) is None
        admission.queue.push(each, now_ns=0, deadline_ns=None)
    running: list[Generation] = []
    while waiting or running:
        head = admission.queue.head()
        assert head is (waiting[0] if waiting else None)
        if head is not None and admission.has_room(head):
            admission.start(head, now_ns=0)
            running.append(waiting.pop(0))
        else:
            admission.release(running.pop(ends.randrange(len(running))))
        assert admission.running == len(running) <= max_inflight
        for name, info in infos.items():
            blocks = sum(-(-each.kv_tokens // info.block_tokens) for each in running)
            assert admission.replicas.reserved_blocks(name) == blocks <= info.kv_blocks


@pytest.mark.parametrize(("blocks", "most"), [(10, 40), (300, 1000)], ids=["pool", "context"])
def test_a_prompt_for_which_no_model_has_room_is_refused_before_it_is_a_request(blocks: int, most: int) -> None:
    replicas = {"small": ("small",), "large": ("large",)}
    admission = Admission(replicas, max_inflight=1, connect_timeout_ns=1, queue=EntryQueuePolicy())
    admission.replicas.connected("small", model_info("small", block_tokens=4, kv_blocks=5))
    admission.check_length(10**6)  # the other one may have room
    admission.replicas.connected("large", model_info("large", block_tokens=4, kv_blocks=blocks))
    admission.check_length(most - 1)  # and one of the response
    with pytest.raises(PromptTooLong, match=rf"prompt \({most} tokens\) .* model 'large' .* {most} tokens.*: shorten"):
        admission.check_length(most)


# --- deadlines --------------------------------------------------------------------------------------------------------


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


# --- models that are away ---------------------------------------------------------------------------------------------


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


def test_a_peer_that_never_said_who_it_is_prolongs_nobodys_patience() -> None:
    cluster = Cluster(connect=False, connect_timeout_ns=500 * MS)
    cluster.connect("small")
    cluster.deliver_all()
    waiting = cluster.submit(request(PROMPT))
    cluster.orchestrator.disconnected("large", now_ns=cluster.now_ns + 300 * MS)
    cluster.tick(at_ns=cluster.now_ns + 500 * MS)
    assert isinstance(cluster.error(waiting), ModelUnavailable)
