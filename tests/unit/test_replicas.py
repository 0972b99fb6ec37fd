"""Several replicas of a model: who goes where, who moves, and that nobody sees it in the tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import MS, PROMPT, expected_tokens, request, spec, writers
from tokenrouter.batcher import Batching
from tokenrouter.errors import ModelUnavailable
from tokenrouter.messages import Open
from tokenrouter.replicas import replica_names

ALTERNATING = spec("scripted", writers=[0, 1])
LARGES = ("large", "large_1", "large_2")


def opened(cluster: Cluster, name: str) -> int:
    return cluster.subserver(name).open_sequences


def test_the_first_replica_has_the_name_of_the_model() -> None:
    assert replica_names("large", 1) == ("large",)
    assert replica_names("large", 3) == LARGES
    with pytest.raises(ValueError, match="'large': 0; give 1 or more"):
        replica_names("large", 0)


def test_requests_go_where_most_kv_is_free_and_thresholds_count_those_who_went_there() -> None:
    cluster = Cluster(replicas={"large": 3}, kv_tokens={"large": 400, "large_1": 800, "large_2": 400})
    for _ in range(12):
        cluster.submit(request(PROMPT, policy=ALTERNATING, max_tokens=6))
    cluster.deliver_all()
    # Twelve tokens each: 800 against twice 400, so nobody goes elsewhere before 34 are there.
    assert [cluster.subserver(name).in_flight for name in ("small", *LARGES)] == [12, 0, 12, 0]
    assert [cluster.orchestrator.pinned(name) for name in LARGES] == [0, 12, 0]
    even = Cluster(replicas={"large": 3}, kv_tokens={"large": 400})
    keys = [even.submit(request(PROMPT, policy=ALTERNATING)) for _ in range(7)]
    even.deliver_all()
    assert [even.subserver(name).in_flight for name in ("small", *LARGES)] == [7, 3, 2, 2]
    even.run()
    assert [even.result(key).tokens for key in keys] == [expected_tokens(PROMPT, 8)] * 7
    assert all(even.subserver(name).statistics.visits > 0 for name in LARGES)
    even.assert_conserved()


def test_a_response_names_models_not_replicas() -> None:
    cluster = Cluster(replicas={"small": 2, "large": 2})
    keys = [cluster.submit(request(PROMPT, policy=ALTERNATING)) for _ in range(4)]
    cluster.run()
    for key in keys:
        assert writers(cluster.result(key)) == ["small", "large"] * 3 + ["small"]
        assert set(cluster.result(key).kv_blocks) == {"small", "large"}


@pytest.mark.parametrize("at", ["large", "small"])
def test_a_request_whose_replica_dies_goes_on_at_another_one_at_once(at: str) -> None:
    """Wherever it is: at that replica, or elsewhere with KV left there."""
    cluster = Cluster(replicas={"large": 2}, connect_timeout_ns=10 * MS)
    key = cluster.submit(request(PROMPT, policy=ALTERNATING))
    cluster.deliver_all()
    while cluster.subserver(at).residents == 0 or opened(cluster, "large") == 0:
        assert cluster.step("small") or cluster.step("large")
        cluster.deliver_all()
    cluster.kill("large")
    moved = [message for _, message in cluster.orchestrator.outbox]
    assert not moved
    assert [cluster.orchestrator.pinned(name) for name in LARGES[:2]] == [0, 1]
    cluster.run()
    assert cluster.result(key).tokens == expected_tokens(PROMPT, 8)
    assert cluster.orchestrator.statistics.moved == 1
    cluster.connect("large")
    cluster.deliver_all()
    cluster.assert_conserved()


def test_one_that_finds_no_room_elsewhere_waits_for_room_and_nobody_overtakes_it() -> None:
    # One fits on each replica.
    cluster = Cluster(replicas={"large": 2}, kv_tokens={"large": 28})
    keys = [cluster.submit(request(PROMPT, policy=ALTERNATING)) for _ in range(3)]
    assert [cluster.orchestrator.pinned(name) for name in LARGES[:2]] == [1, 1]
    assert cluster.orchestrator.queued == 1
    cluster.kill("large_1")
    late = cluster.submit(request(PROMPT, policy=spec("single", model="small")))
    cluster.run()
    for key in (*keys, late):
        assert cluster.result(key).tokens == expected_tokens(PROMPT, 8)
    firsts = [cluster.result(key).started_ns for key in keys]
    assert firsts == sorted(firsts)
    cluster.connect("large_1")
    cluster.deliver_all()
    cluster.assert_conserved()


def test_it_goes_back_if_its_replica_returns_first() -> None:
    cluster = Cluster(("large",), replicas={"large": 2}, kv_tokens={"large": 16})
    keys = [cluster.submit(request(PROMPT, policy=spec("single"))) for _ in range(2)]
    cluster.deliver_all()
    cluster.kill("large")
    cluster.connect("large")
    cluster.deliver_all()
    assert [opened(cluster, name) for name in LARGES[:2]] == [1, 1]
    cluster.run()
    assert [cluster.result(key).tokens for key in keys] == [expected_tokens(PROMPT, 8)] * 2
    assert cluster.orchestrator.statistics.moved == 0
    cluster.assert_conserved()


def test_it_gives_up_when_every_replica_that_could_hold_it_is_away() -> None:
    cluster = Cluster(
        ("large",), replicas={"large": 2}, kv_tokens={"large": 400, "large_1": 12}, connect_timeout_ns=50 * MS
    )
    key = cluster.submit(request(PROMPT, policy=spec("single")))
    cluster.deliver_all()
    cluster.kill("large")
    assert not cluster.updates[key]
    cluster.run()
    assert isinstance(cluster.error(key), ModelUnavailable)
    assert "'large' is not connected" in str(cluster.error(key))


def test_a_deployment_starts_with_the_replicas_that_are_there() -> None:
    cluster = Cluster(replicas={"large": 2}, connect=False)
    key = cluster.submit(request(PROMPT, policy=ALTERNATING))
    cluster.connect("small")
    cluster.connect("large_1")
    cluster.run()
    assert cluster.result(key).tokens == expected_tokens(PROMPT, 8)


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    small=st.integers(1, 3),
    large=st.integers(1, 3),
    speculation=st.booleans(),
    deaths=st.booleans(),
)
def test_tokens_do_not_depend_on_replicas_nor_on_their_deaths(
    seed: int, small: int, large: int, speculation: bool, deaths: bool
) -> None:
    """Conservation and tokens by the script, over random replicas, KV, thresholds, cancels, deaths and orders."""
    rng = random.Random(seed)
    names = ("small", "large")
    cluster = Cluster(
        names,
        replicas={"small": small, "large": large},
        batching={
            name: Batching(threshold=rng.randint(1, 3), max_queue_delay_ns=rng.randrange(20 * MS)) for name in names
        },
        engine={"max_batch_size": rng.randint(1, 4), "max_num_tokens": rng.randint(7, 12)},
        kv_tokens={
            name: rng.choice([24, 40, 400])
            for model, count in (("small", small), ("large", large))
            for name in replica_names(model, count)
        },
        max_inflight=rng.randint(1, 8),
        connect_timeout_ns=10**15,
    )
    submitted: dict[int, tuple[list[int], int]] = {}
    cancelled: set[int] = set()
    dead: set[str] = set()
    for _ in range(400):
        chance = rng.random()
        if chance < 0.06 and len(submitted) < 14:
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
            wants = speculation and rng.random() < 0.5
            script = spec("scripted", writers=[rng.randrange(2) for _ in range(4)])
            script = spec("random", p=0.5) if wants else script
            max_tokens = rng.randint(1, 12)
            what = request(
                prompt, max_tokens=max_tokens, policy=script, stream=rng.random() < 0.5, speculation=wants or None
            )
            submitted[cluster.submit(what)] = (prompt, max_tokens)
        elif chance < 0.08 and submitted:
            key = rng.choice(list(submitted))
            cancelled.add(key)
            cluster.cancel(key)
        elif deaths and chance < 0.12:
            name = rng.choice(list(cluster.model_of))
            (cluster.connect if name in dead else cluster.kill)(name)
            dead ^= {name}
        else:
            cluster.random_event(rng)
        _assert_pins_add_up(cluster)
    cluster.assert_all_end_right(rng, submitted, cancelled=cancelled, dead=dead)


def _assert_pins_add_up(cluster: Cluster) -> None:
    """Every running request is pinned once per model, and the ledger never exceeds a pool that is connected."""
    for names in cluster.replicas.values():
        assert sum(cluster.orchestrator.pinned(name) for name in names) == cluster.orchestrator.in_flight
    for name, link in cluster.links.items():
        if link.subserver is not None:
            assert cluster.orchestrator.reserved_blocks(name) <= link.subserver.engine.info.kv_blocks


def test_a_moved_request_is_opened_with_all_its_tokens_and_keeps_its_visits_apart() -> None:
    cluster = Cluster(replicas={"large": 2})
    key = cluster.submit(request(PROMPT, policy=ALTERNATING, max_tokens=6))
    cluster.deliver_all()
    while not cluster.subserver("large").residents:
        assert cluster.step("small") or cluster.step("large")
        cluster.deliver_all()
    written = len(PROMPT) + 1
    cluster.now_ns += MS
    cluster.orchestrator.disconnected("large", now_ns=cluster.now_ns)
    opens = [(name, message) for name, message in cluster.orchestrator.outbox if isinstance(message, Open)]
    assert [(name, len(message.tokens)) for name, message in opens] == [("large_1", written)]
    assert opens[0][1].in_flight == 1
    assert key in list(cluster.orchestrator.keys())
