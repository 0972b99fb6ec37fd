"""Speculative hand-off writes what plain routing writes, whatever happens in which order."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.repositories import VOCAB_SIZE
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import MS, request, spec, writers
from tests.unit.speculation_worlds import MODELS, POLICIES, PROMPTS, SAMPLING, WORLDS, World, asked, told
from tests.unit.test_subserver import Elsewhere, FailsOnce
from tokenrouter.engines.emulated.signals import SignalsConfig
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.messages import Close, Guess, Guesses, ModelInfo, PolicySpec
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Result
from tokenrouter.speculation import Agreement, Speculation
from tokenrouter.subserver.sequence import ModelSequence

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENT_NS = 10_000_000 * MS


def check_guesses(cluster: Cluster, depth: int) -> None:
    """Never more guesses than depth, and KV is the beginning of history plus guesses."""
    for name in MODELS:
        subserver = cluster.links[name].subserver
        for peer in [] if subserver is None else subserver._all_peers():
            for sequence in peer.sequences.values():
                assert len(sequence.lefts) <= depth, f"{name} holds {len(sequence.lefts)} guesses"
                assert len(sequence.guesses) <= depth, f"{name} checks {len(sequence.guesses)} guesses"
                _check_kv(subserver.engine, sequence)  # type: ignore[union-attr]


def _check_kv(engine: Any, sequence: ModelSequence) -> None:
    known = [*sequence.tokens, *(guess.token for guess in sequence.guesses)]
    held = engine._open[sequence.handle].tokens
    assert held[: sequence.kv_length] == known[: sequence.kv_length]
    assert not sequence.resident or len(held) == sequence.kv_length < len(known)


def assert_same(found: Result, expected: Result) -> None:
    assert told(found) == told(expected)
    assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def plain_results(world: World, requests: list[GenerationRequest]) -> list[Result]:
    cluster = world.cluster(ahead=False)
    keys = [cluster.submit(each) for each in requests]
    cluster.run()
    return [cluster.result(key) for key in keys]


@settings(max_examples=40)
@given(world=WORLDS, name=POLICIES, sampling=SAMPLING, order=st.integers(0, 2**32), stream=st.booleans())
def test_a_response_is_that_of_plain_routing(
    routers: str, world: World, name: str, sampling: dict[str, Any], order: int, stream: bool
) -> None:
    requests = asked(world.policy(name, routers), sampling, stream=stream)
    expected = plain_results(world, requests)
    cluster, rng = world.cluster(ahead=True), random.Random(order)
    keys = [cluster.submit(each) for each in requests]
    while cluster.random_event(rng):
        check_guesses(cluster, world.depth)
    cluster.deliver_all()
    for key, result in zip(keys, expected, strict=True):
        assert_same(cluster.result(key), result)
        updates = cluster.updates[key]
        assert [token for update in updates for token in update.tokens] == result.tokens
        assert "".join(update.text for update in updates) == result.text
    # A stop word ends a response while its models go on.
    assert cluster.orchestrator.statistics.stale_messages == 0 or "stop_words" in sampling
    cluster.assert_conserved()


def forget(cluster: Cluster, name: str, key: int) -> None:
    """A model forgets a request that it has no visit of, guesses included."""
    subserver, peer = cluster.links[name].subserver, cluster.links[name].peer
    if subserver is None or peer not in subserver._peers:
        return
    held = subserver._peers[peer].sequences.get(key)
    if held is not None and (held.ahead or not held.resident):
        subserver.handle(peer, Close(key, subserver.in_flight), now_ns=cluster.now_ns)


def faults(cluster: Cluster, rng: random.Random) -> Iterator[Callable[[], Any]]:
    """What may go wrong now; half of the time nothing does."""
    name = rng.choice(MODELS)
    if rng.random() < 0.9 or not cluster.keys():
        return
    key = rng.choice(cluster.keys())
    yield lambda: forget(cluster, name, key)
    yield lambda: (cluster.kill if cluster.links[name].subserver else cluster.connect)(name)
    yield lambda: cluster.cancel(key)


@settings(max_examples=30)
@given(world=WORLDS, name=POLICIES, sampling=SAMPLING, order=st.integers(0, 2**32))
def test_faults_cost_guesses_and_no_token(
    routers: str, world: World, name: str, sampling: dict[str, Any], order: int
) -> None:
    """Models restart, forget requests, and clients go away, in any order."""
    requests = asked(world.policy(name, routers), sampling)
    expected = plain_results(world, requests)
    cluster, rng = world.cluster(ahead=True, connect_timeout_ns=PATIENT_NS), random.Random(order)
    keys = [cluster.submit(each) for each in requests]
    for _ in range(300):
        if possible := list(faults(cluster, rng)):
            rng.choice(possible)()
        elif not cluster.keys():
            break
        else:
            cluster.random_event(rng)
        check_guesses(cluster, world.depth)
    for model in MODELS:
        if cluster.links[model].subserver is None:
            cluster.connect(model)
    cluster.walk(rng)
    cluster.deliver_all()
    for key, result in zip(keys, expected, strict=True):
        if cluster.updates[key][-1].result is not None:
            assert_same(cluster.result(key), result)
        else:
            assert cluster.error(key).slug == "cancelled"
    cluster.assert_conserved()


# --- what it is for --------------------------------------------------------------------------------------------------
def test_one_step_decides_several_positions_and_guesses_that_come_meanwhile_go_into_the_next() -> None:
    cluster = World(1.0, 1.0, 1.0, 8).cluster(ahead=True)
    key = cluster.submit(request([5], max_tokens=12, end_ids=(), policy=spec("random", p=1.0)))
    cluster.deliver_all()
    for _ in range(4):  # one guess where it left, three behind it
        assert cluster.step("small")
    for _ in range(4):
        cluster.deliver_up("small")
    while cluster.deliver_down("large"):
        pass
    assert cluster.step("large")
    statistics = cluster.subserver("large").statistics
    assert (statistics.checks, statistics.checked_positions) == (1, 4)
    assert cluster.step("small")
    cluster.deliver_up("small")
    # The orchestrator has heard nothing of the check yet, and the large model goes on.
    assert not cluster.updates[key]
    while cluster.deliver_down("large"):
        pass
    assert cluster.step("large")
    assert (statistics.checks, statistics.checked_positions) == (2, 5)
    cluster.run()
    assert writers(cluster.result(key)) == ["large"] * 12
    assert cluster.orchestrator.speculation.agreement["random"].rolled_back == 0


def test_statistics_count_hand_offs_as_plain_routing_makes_them() -> None:
    counts = []
    for ahead in (False, True):
        cluster = World(0.7, 0.35, 0.6, 8).cluster(ahead=ahead)
        keys = [
            cluster.submit(request(prompt, max_tokens=60, end_ids=(), policy=spec("rstitch"))) for prompt in PROMPTS
        ]
        cluster.run()
        found = [cluster.subserver(name).statistics for name in MODELS]
        moves = [{move: n for move, n in each.routes.items() if move[0] != "(end)"} for each in found]
        ends = [sum(each.routes.values()) for each in found]
        counts.append((cluster.orchestrator.statistics.handoffs, [f.committed_tokens for f in found], ends))
        assert sum(cluster.result(key).handoffs for key in keys) == cluster.orchestrator.statistics.handoffs
        assert all(moves)
    assert counts[0] == counts[1]


def test_guesses_reach_a_request_that_waits_for_its_policy() -> None:
    cluster, loader = World(1.0, 1.0, 1.0, 8).cluster(ahead=True), Elsewhere()
    cluster.subserver("large").load_with(loader)
    key = cluster.submit(request([5], max_tokens=12, end_ids=(), policy=spec("random", p=1.0)))
    cluster.deliver_all()
    for _ in range(4):
        assert cluster.step("small")
        cluster.deliver_all()
    loader.finish(cluster)
    assert cluster.step("large")
    assert cluster.subserver("large").statistics.checked_positions == 4
    cluster.run()
    assert len(cluster.result(key).tokens) == 12
    cluster.assert_conserved()


# --- who goes ahead, and when ----------------------------------------------------------------------------------------
def guesses_made(cluster: Cluster, policy: str = "random") -> int:
    found = cluster.orchestrator.speculation.agreement[policy]
    return found.confirmed + found.rolled_back


@pytest.mark.parametrize(
    ("deployment", "asked_for", "goes"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_a_request_may_choose(deployment: bool, asked_for: bool | None, goes: bool) -> None:
    cluster = World(1.0, 0.5, 1.0, 8).cluster(ahead=deployment)
    cluster.submit(request(PROMPTS[0], policy=spec("random", p=0.5), speculation=asked_for))
    cluster.run()
    assert (guesses_made(cluster) > 0) is goes


@pytest.mark.parametrize("policy", [spec("me"), spec("scripted", writers=[0, 1]), spec("r2r", strategy="momentum")])
def test_policies_that_need_more_are_served_plainly_and_refused_to_who_asks(
    policy: PolicySpec, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = World(1.0, 0.5, 1.0, 8).cluster(ahead=True)
    with pytest.raises(InvalidRequest, match=f"speculation is true, but policy '{policy.name}'"):
        cluster.submit(request(PROMPTS[0], policy=policy, speculation=True))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            cluster.submit(request(PROMPTS[0], policy=policy))
        cluster.run()
    assert [record.message.partition(":")[0] for record in caplog.records].count("served without speculation") == 1
    assert guesses_made(cluster, policy.name) == 0
    cluster.assert_conserved()


def info(**fields: Any) -> ModelInfo:
    known = {"version": PROTOCOL_VERSION, "model": "large", "engine": "x", "emulated": True, "vocab_size": VOCAB_SIZE}
    return ModelInfo(**{**known, "max_context": 100, "block_tokens": 4, "kv_blocks": 100, **fields})


def test_engines_that_own_their_loop_are_served_plainly() -> None:
    cluster = World(1.0, 0.5, 1.0, 8).cluster(ahead=True)
    cluster.orchestrator.receive("large", info(speculates=False), now_ns=cluster.now_ns)
    with pytest.raises(InvalidRequest, match="'large' owns its decoding loop"):
        cluster.submit(request(PROMPTS[0], policy=spec("random", p=0.5), speculation=True))
    cluster.submit(request(PROMPTS[0], policy=spec("random", p=0.5)))
    cluster.run()
    assert guesses_made(cluster) == 0


def test_below_the_least_agreement_requests_wait_and_are_still_compared() -> None:
    cluster = Cluster(
        engine={"repeat": True, "max_seq_len": 512},
        per_model={"large": {"signals": SignalsConfig(agreement=0.3)}, "small": {"signals": SignalsConfig()}},
        speculation=Speculation(8, 0.6),
    )
    policy = spec("random", p=0.5)
    for _ in range(2):
        cluster.submit(request(PROMPTS[0], max_tokens=200, end_ids=(), policy=policy))
        cluster.run()
    made, found = guesses_made(cluster), cluster.orchestrator.speculation.agreement["random"]
    assert found.compared > 150
    cluster.submit(request(PROMPTS[0], max_tokens=200, end_ids=(), policy=policy))
    cluster.run()
    assert guesses_made(cluster) == made
    assert found.compared > 250


def test_the_average_moves() -> None:
    agreement = Agreement()
    for _ in range(63):
        agreement.observe(False)
    assert agreement.suffices(0.9)
    agreement.observe(False)
    assert not agreement.suffices(0.1)
    for _ in range(2000):
        agreement.observe(True)
    assert agreement.suffices(0.9)
    assert (agreement.compared, agreement.agreed) == (2064, 2000)


# --- what goes wrong -------------------------------------------------------------------------------------------------
def test_a_step_that_fails_ahead_costs_a_guess_only() -> None:
    cluster = Cluster(
        wrap=lambda name, engine: FailsOnce(engine, 2) if name == "small" else engine,
        engine={"repeat": True},
        speculation=Speculation(8),
    )
    key = cluster.submit(request(PROMPTS[0], max_tokens=8, end_ids=(), policy=spec("random", p=1.0)))
    cluster.deliver_all()
    assert cluster.step("small")
    assert cluster.step("small"), "the step that fails"
    cluster.run()
    assert cluster.result(key).tokens == [10, 20, 30, 40] * 2
    cluster.assert_conserved()


@pytest.mark.parametrize(("guesses", "says"), [([VOCAB_SIZE], "token id 257"), ([1] * 20, "KV is leased for 12")])
def test_guesses_that_no_step_could_run_end_their_request_only(guesses: list[int], says: str) -> None:
    cluster = World(1.0, 1.0, 1.0, 8).cluster(ahead=True)
    keys = [cluster.submit(request(PROMPTS[0], end_ids=(), policy=spec("random", p=1.0))) for _ in range(2)]
    cluster.deliver_all()
    assert cluster.step("small")
    cluster.deliver_all()
    visit = cluster.orchestrator._generations[keys[0]].visits.number
    bad = Guesses(keys[0], visit, 2, 1, [Guess(token, False) for token in guesses])
    cluster.subserver("large").handle(cluster.links["large"].peer, bad, now_ns=cluster.now_ns)
    cluster.collect()
    cluster.run()
    assert says in str(cluster.error(keys[0]))
    assert cluster.result(keys[1]).tokens == [10, 20, 30, 40] * 2
    cluster.assert_conserved()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"depth": 0}, "depth is 0; it is at least 1"),
        ({"least_agreement": 1.5}, r"least_agreement is 1.5; it lies in \[0, 1\]"),
        ({"least_agreement": float("nan")}, r"least_agreement is nan; it lies in \[0, 1\]"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Speculation(**fields)


def test_a_depth_beyond_the_context_is_refused_when_the_model_connects() -> None:
    cluster = Cluster(connect=False, speculation=Speculation(100))
    with pytest.raises(ConfigError, match=r"speculation\.depth is 100; model 'large' has a context of 100 tokens"):
        cluster.orchestrator.receive("large", info(), now_ns=0)
