"""Replies beside known answers, and what a run of chaos makes of them."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perf.chaos.absences import Absence, absences
from perf.chaos.events import EVENTS, in_order
from perf.chaos.outcome import Event, Outcome
from perf.chaos.plot import plot
from perf.chaos.table import markdown
from perf.load.known import KnownAnswer, Reply, Verdict, judged, known_answers
from perf.load.known_loop import Attempt, Judged
from perf.load.soak.memory import Sample
from perf.load.ways import Endpoints, over_http, over_v1
from tests.support.repositories import emulated_spec, write_emulated

KNOWN = KnownAnswer("a", {"max_tokens": 3}, [7, 8, 9], "length")


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (Reply([7, 8, 9], "length"), Verdict.RIGHT),
        (Reply([7, 8, 9], "stop"), Verdict.WRONG),
        (Reply([7, 8, 9]), Verdict.WRONG),
        (Reply([7, 8], "length"), Verdict.WRONG),
        (Reply([7, 8, 9, 9], "length"), Verdict.WRONG),
        (Reply([7, 8], error="away"), Verdict.FAILED),
        (Reply([], error="away"), Verdict.FAILED),
        (Reply([7, 1], error="away"), Verdict.WRONG),
        (Reply([7], error="late", timed_out=True), Verdict.HUNG),
    ],
)
def test_a_reply_is_right_wrong_failed_or_hung(reply: Reply, verdict: Verdict) -> None:
    assert judged(reply, KNOWN) is verdict


@contextmanager
def one_answer(content: bytes) -> Iterator[int]:
    """A server that answers one connection with these bytes and closes it; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def events(*contents: object, whole: bool = True) -> bytes:
    """A stream of events in chunks; without its last chunk if not whole."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"data: " + json.dumps(content).encode() + b"\n\n" for content in contents]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + (b"0\r\n\r\n" if whole else b"")


FIRST = {"output_ids": [7, 8]}
LAST = {"output_ids": 9, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        pytest.param(events(FIRST, LAST), Verdict.RIGHT, id="whole"),
        pytest.param(events(FIRST, whole=False), Verdict.FAILED, id="broken-off"),
        pytest.param(events(FIRST), Verdict.WRONG, id="ends-without-a-reason"),
        pytest.param(events(FIRST, {"error": "away"}), Verdict.FAILED, id="an-error-in-the-stream"),
        pytest.param(b"HTTP/1.1 503 Away\r\nContent-Length: 2\r\n\r\n{}", Verdict.FAILED, id="a-status"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}", Verdict.FAILED, id="cut-off"),
        pytest.param(b"", Verdict.FAILED, id="closed"),
    ],
)
def test_a_stream_that_breaks_is_not_taken_for_a_whole_one(content: bytes, verdict: Verdict) -> None:
    with one_answer(content) as port:
        assert judged(over_http(Endpoints(port, 0), KNOWN, 30.0, True), KNOWN) is verdict


def test_completions_are_read_by_their_routing() -> None:
    choice = {"routing": {"token_ids": [7, 8, 9]}, "finish_reason": "length"}
    body = json.dumps({"choices": [choice]}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with one_answer(head + body) as port:
        assert judged(over_v1(Endpoints(0, 0, port), KNOWN, 30.0, False), KNOWN) is Verdict.RIGHT


def test_who_does_not_answer_has_hung() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reply = over_http(Endpoints(silent.getsockname()[1], 0), KNOWN, 0.2, False)
    assert judged(reply, KNOWN) is Verdict.HUNG


def test_known_answers_are_those_of_every_policy(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated_spec())
    policies = [("", {}), ("single", {"model": "large"}), ("random", {"p": 0.5})]
    found = known_answers(tmp_path, ["hello", "a prompt"], max_tokens=4, policies=policies)
    assert [answer.fields.get("policy") for answer in found] == [None, "single", "random"] * 2
    assert all(len(answer.tokens) <= 4 for answer in found)
    assert json.loads(found[1].tensors["policy_params"]) == {"model": "large"}


# --- chaos ------------------------------------------------------------------------------------------------------------


def test_an_order_follows_from_the_seed_and_has_every_kind_once() -> None:
    assert in_order(3) == in_order(3) != in_order(4)
    assert sorted(in_order(3)) == sorted(EVENTS)


def attempt(began_s: float, ended_s: float, *, way: str = "HTTP, whole", verdict: Verdict = Verdict.FAILED) -> Attempt:
    return Attempt(verdict, way, "", began_s, ended_s, "away")


def outcome(*others: Attempt, kind: str = "kill tokenrouter", recovery_s: float | None = 2.0) -> Outcome:
    event = Event(kind, 10.0, 10.1, recovery_s, 0.01)
    verdicts = Counter(other.verdict for other in others)
    died = [Absence(kind.removeprefix("kill "), 10.0, 12.0)] if kind.startswith("kill") else []
    return Outcome(1, 4, seconds=60.0, judged=Judged(verdicts, others=list(others)), events=[event], absences=died)


@pytest.mark.parametrize(
    ("kind", "other", "excused"),
    [
        ("kill tokenrouter", attempt(9.0, 10.2), True),
        ("kill tritonserver", attempt(12.5, 12.6), True),
        ("kill tokenrouter", attempt(7.0, 8.5), False),
        ("kill tokenrouter", attempt(14.0, 15.0), False),
        ("stop tokenrouter", attempt(11.5, 11.6), True),
        ("stop tokenrouter", attempt(14.0, 15.0), False),
        ("stop small", attempt(10.0, 11.0), False),
        ("kill small", attempt(10.0, 11.0), False),
        ("kill openai", attempt(10.0, 11.0), False),
        ("kill openai", attempt(10.0, 11.0, way="/v1, whole"), True),
        ("kill tokenrouter", attempt(10.0, 11.0, verdict=Verdict.WRONG), False),
        ("kill tokenrouter", attempt(10.0, 70.0, verdict=Verdict.HUNG), False),
    ],
)
def test_only_the_death_of_the_entry_or_of_the_server_excuses_a_failure(
    kind: str, other: Attempt, excused: bool
) -> None:
    assert (outcome(other, kind=kind).broken() == []) is excused


def test_what_does_not_come_back_is_broken_and_what_comes_late_is_over_its_bound() -> None:
    assert outcome().broken() == outcome().slow() == []
    assert outcome(recovery_s=None).broken() == ["kill tokenrouter: no right answer followed"]
    assert outcome(recovery_s=20.0).broken() == []
    assert outcome(recovery_s=20.0).slow() == ["kill tokenrouter: back after 20.0 s, more than 15 s"]


@pytest.mark.parametrize(
    ("name", "from_s", "excused"),
    [("tritonserver", 9.5, True), ("tokenrouter", 10.0, True), ("large", 10.0, False), ("tritonserver", 20.0, False)],
)
def test_an_event_need_not_be_answered_by_a_server_that_is_dead(name: str, from_s: float, excused: bool) -> None:
    found = outcome(kind="kill small")
    found.events[0] = replace(found.events[0], failures=["no response"])
    found.absences = [Absence(name, from_s, from_s + 5.0)]
    assert ("kill small: no response" not in found.broken()) is excused


@pytest.mark.parametrize(
    ("kind", "name", "from_s", "told"),
    [
        ("kill small", "small", 30.0, ["small died after 30 s, and nobody had killed it"]),
        ("kill small", "small", 10.0, []),
        ("kill tritonserver", "small", 11.0, []),
        ("kill small", "tritonserver", 21.0, []),
        ("kill openai", "tritonserver", 21.0, ["tritonserver died after 21 s, and nobody had killed it"]),
        ("stop tokenrouter", "tokenrouter", 12.0, []),
        ("stop tokenrouter", "tritonserver", 22.0, []),
        ("stop tokenrouter", "small", 12.0, ["small died after 12 s, and nobody had killed it"]),
        ("stop tokenrouter", "tritonserver", 60.0, ["tritonserver died after 60 s, and nobody had killed it"]),
    ],
)
def test_a_process_that_died_and_was_not_killed_is_told(kind: str, name: str, from_s: float, told: list[str]) -> None:
    found = outcome(kind=kind)
    found.absences = [Absence(name, from_s, from_s + 5.0)]
    assert found.broken() == told
    assert found.taken_along == (not told and kind != f"kill {name}" and kind != "kill tritonserver")


def test_absences_are_read_off_the_log_of_the_supervisor() -> None:
    log = """I1130 08:47:56 1 model_lifecycle.cc:624] "successfully unloaded 'large' version 1"
2026-11-30 08:47:55 supervisor: the process of large (30273) ended
2026-11-30 08:47:55 supervisor: large ended (event 1 in 60 s, at most 5)
2026-11-30 08:48:00 supervisor: large is back after 4.87 s
2026-11-30 08:48:22 supervisor: tritonserver (process 30257) ended
2026-11-30 08:48:40 supervisor: the process of small ended before it was watched
"""
    (large, server, small) = absences(log)
    assert (small.name, round(small.from_s - large.from_s)) == ("small", 45)
    assert (large.name, round(large.to_s - large.from_s)) == ("large", 6)
    assert (server.name, round(server.from_s - large.from_s), server.to_s) == ("tritonserver", 27, float("inf"))


def test_facts_and_figure_of_a_run(tmp_path: Path) -> None:
    found = outcome(attempt(9.0, 10.2))
    found.judged.moments = [1.0, 2.0, 30.0]
    values = {"rss_mib": 10.0}
    found.samples = [Sample(at_s, name, values) for at_s in (0.0, 30.0) for name in ("small", "large")]
    facts = json.loads(json.dumps(found.facts()))
    assert facts["failed_clearly"] == 1
    assert facts["failed_beside_no_death"] == 0
    assert facts["recovery_seconds"] == {"kill tokenrouter": {"count": 1, "p50": 2.0, "max": 2.0}}
    assert facts["events"] == {"kill tokenrouter": 1}
    assert "| kill tokenrouter | 1 | 2.0 s | 2.0 s | 15 s |" in markdown(facts)
    assert "0 wrong, 0 hung, 1 failed clearly, 0 failed beside no death" in markdown(facts)
    plot(found, tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").stat().st_size > 1000
