"""Whatever happens in which order, every request ends once and nothing of it is left."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cluster import NAMES, Cluster, model_info
from tests.unit.emulated_requests import MS, request, spec
from tokenrouter.batcher import Batching
from tokenrouter.messages import Outcome, Report, ReportRow

MODELS = NAMES[2]
ROWS = st.builds(
    ReportRow,
    request=st.integers(1, 4),
    visit=st.integers(1, 3),
    outcome=st.sampled_from(Outcome),
    tokens=st.lists(st.integers(0, 9), max_size=2),
    target=st.sampled_from(MODELS),
)
DEEDS = st.one_of(
    st.tuples(st.just("submit"), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(1, 4)),
    st.tuples(st.just("report"), st.tuples(st.sampled_from(MODELS), ROWS)),
    st.tuples(st.just("connect"), st.sampled_from(MODELS)),
    st.tuples(st.just("disconnect"), st.sampled_from(MODELS)),
    st.tuples(st.just("tick"), st.integers(0, 40)),
)


@settings(max_examples=60)
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
    cluster.assert_all_end_right(rng, submitted, cancelled=cancelled, dead=dead)


@settings(max_examples=300)
@given(deeds=st.lists(DEEDS, max_size=60))
def test_whatever_models_report_every_request_ends_once_and_the_ledger_is_right(deeds: list[tuple[str, Any]]) -> None:
    """Also what no model would say: reports on other visits, of absent models, hand-offs to itself."""
    orchestrator = Cluster(connect=False, max_inflight=3, connect_timeout_ns=60 * MS).orchestrator
    connected: set[str] = set()
    final: list[int] = []
    submitted, now_ns = 0, MS
    for deed, what in deeds:
        if deed == "submit":
            orchestrator.submit(request([1, 2], stream=what, timeout_ns=90 * MS), now_ns=now_ns)
            submitted += 1
        elif deed == "cancel":
            orchestrator.cancel(what, now_ns=now_ns)
        elif deed == "report":
            orchestrator.receive(what[0], Report(now_ns, [what[1]]), now_ns=now_ns)
        elif deed == "connect":
            orchestrator.receive(what, model_info(what), now_ns=now_ns)
            connected.add(what)
        elif deed == "disconnect":
            orchestrator.disconnected(what, now_ns=now_ns)
            connected.discard(what)
        else:
            now_ns += what * MS
            orchestrator.tick(now_ns=now_ns)
        assert {model for model, _ in orchestrator.outbox} <= connected
        orchestrator.outbox.clear()
        final += [update.key for update in orchestrator.take_updates() if update.final]
        assert orchestrator.in_flight <= 3
        assert len(list(orchestrator.keys())) == orchestrator.in_flight + orchestrator.queued
        # Two of the prompt and eight of the response, in blocks of four.
        assert {orchestrator.reserved_blocks(model) for model in MODELS} == {3 * orchestrator.in_flight}
    orchestrator.tick(now_ns=now_ns + 90 * MS)
    final += [update.key for update in orchestrator.take_updates() if update.final]
    assert sorted(final) == list(range(1, submitted + 1))
    assert orchestrator.in_flight == orchestrator.queued == 0
