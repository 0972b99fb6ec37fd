"""A policy that goes wrong fails its own requests, says which method it was, and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.repositories import END_ID
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import PROMPT, request, spec
from tokenrouter.errors import PolicyFailed, RouterError
from tokenrouter.messages import PolicySpec

FAULTS = [
    ("visited", "raises"),
    ("visited", "exits"),
    ("visited", "refuses"),
    ("visited", "returns_none"),
    ("visited", "returns_unknown_model"),
    ("entry", "raises"),
    ("entry", "exits"),
    ("entry", "refuses"),
    ("entry", "returns_none"),
    ("entry", "returns_nowhere"),
    ("mask", "raises"),
    ("mask", "exits"),
    ("mask", "refuses"),
    ("mask", "returns_none"),
    ("mask", "returns_ids_out_of_range"),
    ("mask", "returns_text_ids"),
    ("receive", "raises"),
    ("receive", "exits"),
    ("receive", "refuses"),
    ("receive", "returns_none"),
    ("receive", "returns_unknown_limit"),
    ("receive", "returns_zero_limit"),
    ("route", "raises"),
    ("route", "exits"),
    ("route", "refuses"),
    ("route", "returns_none"),
    ("route", "returns_unknown_model"),
    ("route", "returns_unknown_index"),
    ("route", "returns_too_few"),
    ("send", "raises"),
    ("send", "exits"),
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
    key = cluster.submit(request(PROMPT, policy=PolicySpec("tests.unit.faulty_policies:Stray")))
    cluster.run()
    assert isinstance(cluster.error(key), PolicyFailed)
    assert "not among the models it visits" in str(cluster.error(key))
    cluster.assert_conserved()


def test_a_policy_that_cannot_say_what_it_remembers_fails_its_own_requests() -> None:
    cluster = Cluster()
    neighbour = cluster.submit(request(PROMPT))
    key = cluster.submit(request(PROMPT, policy=PolicySpec("tests.unit.faulty_policies:CannotSay")))
    cluster.run()
    assert isinstance(cluster.error(key), PolicyFailed)
    assert "'cannot_say', remembers: RuntimeError: boom" in str(cluster.error(key))
    assert cluster.result(neighbour).tokens == [*PROMPT, END_ID]
    cluster.assert_conserved()


@pytest.mark.parametrize("lost", ["small", "large"])
@pytest.mark.parametrize("events", range(4, 44, 8))
def test_a_model_that_is_lost_takes_nothing_with_it_that_a_policy_remembers(events: int, lost: str) -> None:
    """The count of decisions lives at the small model, between hand-offs too."""
    prompt = [*PROMPT, *PROMPT, *PROMPT]
    cluster = Cluster()
    policy = PolicySpec("tests.unit.faulty_policies:Remembers")
    key = cluster.submit(request(prompt, policy=policy, max_tokens=32))
    for _ in range(events):
        cluster.random_event(Random(events))
    cluster.kill(lost)
    cluster.connect(lost)
    cluster.run()
    result = cluster.result(key)
    assert result.tokens == [*prompt, END_ID]
    writers = [run.model for run in result.runs for _ in range(run.start, run.end)]
    assert writers == ["large" if i % 3 == 2 else "small" for i in range(len(writers))]


def test_a_policy_under_which_nobody_keeps_a_token_is_stopped() -> None:
    cluster = Cluster()
    key = cluster.submit(request(PROMPT, policy=PolicySpec("tests.unit.faulty_policies:PingPong")))
    neighbour = cluster.submit(request(PROMPT))
    cluster.run(limit=200)
    assert isinstance(cluster.error(key), PolicyFailed)
    assert "no model kept a token" in str(cluster.error(key))
    assert cluster.result(neighbour).tokens == [*PROMPT, END_ID]
    cluster.assert_conserved()
