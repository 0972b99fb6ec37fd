"""The table of a request's life: complete, consulted, and the one that CONTRIBUTING.md shows."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import MS, request, spec
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.errors import InternalError, PolicyFailed, PromptTooLong
from tokenrouter.messages import Outcome
from tokenrouter.orchestrator.lifecycle import LIFECYCLE, AnyEvent, Event, State, after
from tokenrouter.speculation import Speculation

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
EVENTS: tuple[AnyEvent, ...] = (*Event, *Outcome)


def markdown() -> str:
    """The table as the document shows it: a row per event, a column per state in which something can happen."""
    states = [state for state in State if LIFECYCLE[state]]
    rows = [["event", *(state.value for state in states)], ["---"] * (len(states) + 1)]
    for event in EVENTS:
        cells = [after(state, event).value if event in LIFECYCLE[state] else "" for state in states]
        rows.append([f"`{event.name}`", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_every_pair_is_in_the_table_or_raises(state: State, event: AnyEvent) -> None:
    if event in LIFECYCLE[state]:
        assert after(state, event) is LIFECYCLE[state][event]
    else:
        with pytest.raises(InternalError, match=f"bug: {event.name} happened to a request that is {state.value} "):
            after(state, event)


def test_every_state_begins_with_waiting_and_can_end_and_the_end_is_final() -> None:
    reached = {State.WAITING}
    for _ in State:
        reached |= {after for state in reached for after in LIFECYCLE[state].values()}
    assert reached == set(State) == set(LIFECYCLE)
    assert [state for state in State if State.OVER not in LIFECYCLE[state].values()] == [State.OVER]
    assert not LIFECYCLE[State.OVER]


def test_the_document_shows_the_table() -> None:
    assert markdown() in CONTRIBUTING.read_text("utf-8"), f"the table of a request's life is now:\n\n{markdown()}\n"


# --- what the machine makes of it -------------------------------------------------------------------------------------

POLICIES = [
    spec("single"),
    spec("scripted", writers=[0, 1]),
    spec("random", p=0.5),
    spec("tests.unit.faulty_policies:Faulty", method="entry", fault="raises"),
    spec("tests.unit.faulty_policies:Faulty", method="route", fault="raises", position=2),
]


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> set[tuple[State, AnyEvent]]:
    """The pairs that the machine asked the table for."""
    pairs: set[tuple[State, AnyEvent]] = set()

    def note(state: State, event: AnyEvent) -> State:
        pairs.add((state, event))
        return after(state, event)

    monkeypatch.setattr("tokenrouter.orchestrator.generation.after", note)
    return pairs


def rough_walk(seed: int) -> Cluster:
    """Everything that can go wrong, in a random order: restarts, evictions, cancels, deadlines, bad policies."""
    rng = random.Random(seed)
    cluster = Cluster(
        max_inflight=3,
        connect_timeout_ns=300 * MS,
        queue=EntryQueuePolicy(default_timeout_ns=900 * MS),
        speculation=Speculation(4) if seed % 2 else None,
    )
    for _ in range(300):
        name, chance = rng.choice(cluster.models), rng.random()
        if chance < 0.10:
            timeout_ns = rng.choice([None, 200 * MS])
            max_tokens = rng.randint(1, 9)
            with suppress(PolicyFailed, PromptTooLong):
                asked = request(range(6), max_tokens=max_tokens, policy=rng.choice(POLICIES), timeout_ns=timeout_ns)
                cluster.submit(asked)
        elif chance < 0.13 and cluster.keys():
            cluster.cancel(rng.choice(cluster.keys()))
        elif chance < 0.14 and cluster.keys():
            cluster.undeliverable(rng.choice(cluster.keys()))
        elif chance < 0.17:
            cluster.kv_tokens[name] = rng.choice([4096, 4096, 12])  # those that wait may not fit any more
            (cluster.kill if cluster.links[name].subserver else cluster.connect)(name)
        elif chance < 0.20 and cluster.keys() and cluster.links[name].subserver:
            cluster.evict(name, rng.choice(cluster.keys()))
        elif chance < 0.25:
            cluster.tick(at_ns=cluster.now_ns + rng.randrange(150) * MS)
        else:
            cluster.random_event(rng)
    if seed % 2:
        cluster.stop_at(cluster.now_ns)
    for name in cluster.models:
        if cluster.links[name].subserver is None:
            cluster.connect(name)
    cluster.walk(rng)
    cluster.deliver_all()
    return cluster


def test_all_of_the_table_happens_and_nothing_else_does(happened: set[tuple[State, AnyEvent]]) -> None:
    for seed in range(120):
        rough_walk(seed).assert_conserved()
    assert happened == {(state, event) for state in State for event in LIFECYCLE[state]}
