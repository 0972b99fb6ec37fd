"""Recordings: what is kept tells what happened, within bounds, and the file follows the format's rules."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chrome_trace import checked
from tests.support.commands import run
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import MS, request, spec
from tokenrouter.batcher import Batching
from tokenrouter.cli import app
from tokenrouter.errors import InvalidRequest, Overloaded, ProtocolError
from tokenrouter.speculation import Speculation
from tokenrouter.timeline import chrome
from tokenrouter.timeline.client import record
from tokenrouter.timeline.machines import MachineRecorder
from tokenrouter.timeline.recording import About, Recording
from tokenrouter.timeline.steps import Member, Step, StepLog
from tokenrouter.timeline.trail import Budget, Follower, Trail

MODELS = ("small", "large")


def recorder(cluster: Cluster) -> MachineRecorder:
    subservers = [cluster.subserver(name) for name in cluster.models]
    return MachineRecorder(cluster.orchestrator, subservers, name="test", now_ns=cluster.now_ns)


def through(recordings: list[Recording]) -> list[Recording]:
    """As they arrive at a client."""
    return [Recording.read(b"\n".join(each.lines()).decode()) for each in recordings]


def slices(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 3),
    threshold=st.integers(1, 3),
    late=st.booleans(),
    requests=st.integers(1, 5),
)
@settings(max_examples=30)
def test_a_recording_tells_what_happened(seed: int, depth: int, threshold: int, late: bool, requests: int) -> None:
    cluster = Cluster(
        engine={"repeat": True},
        batching={"large": Batching(threshold, 5 * MS)},
        speculation=Speculation(depth) if depth else None,
    )
    rng = random.Random(seed)
    keys = [
        cluster.submit(request([1, 2, 3, 4, 5, 6, 7], policy=spec("random", p=0.4), seed=seed % 1000 + each))
        for each in range(requests)
    ]
    if late:
        for _ in range(12):
            cluster.random_event(rng)
    before = [cluster.subserver(name).statistics for name in MODELS]
    counted = [(each.steps, each.new_tokens, each.batch_size.total, each.checked_positions) for each in before]
    over_before = {key for key in keys if cluster.updates[key] and cluster.updates[key][-1].final}
    made = recorder(cluster)
    cluster.walk(rng)
    recordings = made.stop(now_ns=cluster.now_ns)
    assert through(recordings) == recordings
    for recording, numbers, earlier in zip(recordings[1:], before, counted, strict=True):
        found = (
            len(recording.steps),
            sum(step.new_tokens for step in recording.steps),
            sum(len(step.members) for step in recording.steps),
            sum(step.checked for step in recording.steps),
        )
        now = (numbers.steps, numbers.new_tokens, numbers.batch_size.total, numbers.checked_positions)
        assert found == tuple(after - at_first for after, at_first in zip(now, earlier, strict=True))
        reasons = Counter(step.reason for step in recording.steps)
        assert late or reasons == Counter({key: value for key, value in numbers.steps_by_reason.items() if value})
    trails = {trail.request: trail for trail in recordings[0].trails}
    assert trails.keys() == set(keys) - over_before
    for key, trail in trails.items():
        result = cluster.result(key)
        tail = [(run.model, run.end - max(run.start, trail.before)) for run in result.runs if run.end > trail.before]
        assert [(model, tokens) for model, tokens in trail.runs] == tail
        assert trail.end == result.finish_reason
        ends = [stay.end_ns for stay in trail.stays]
        assert all(ends)
        made_guesses = sum(each.made for each in trail.guesses)
        judged = sum(each.confirmed + each.rolled_back for each in trail.guesses)
        assert late or made_guesses >= judged
    events = checked(chrome.document(recordings))
    hand_offs = [event for event in events if event["ph"] == "s"]
    changes = sum(
        one.model != other.model
        for trail in trails.values()
        for one, other in zip(trail.stays, trail.stays[1:], strict=False)
    )
    assert len(hand_offs) == changes if not late and not depth else len(hand_offs) <= changes


def test_nobody_is_followed_by_default_and_nothing_is_kept_afterwards() -> None:
    cluster = Cluster(engine={"repeat": True})
    key = cluster.submit(request([1, 2]))
    assert cluster.orchestrator._generations[key].follower is None
    made = recorder(cluster)
    assert cluster.orchestrator._generations[key].follower is not None
    made.stop(now_ns=cluster.now_ns)
    assert cluster.orchestrator._generations[key].follower is None
    assert cluster.subserver("small")._runner.step_log is None
    cluster.run()
    assert made.stop(now_ns=cluster.now_ns)[0].trails == []


def test_what_is_kept_is_bounded() -> None:
    log = StepLog(5)
    step = Step(0, 1, "threshold", 2, 1, 0, 2, [Member(1, 1, 1, 1, 0), Member(1, 2, 1, 1, 0)])
    for _ in range(3):
        log.add(step)
    assert (len(log.steps), log.budget.dropped) == (1, 6)
    follower = Follower(Trail(1, "random", 1, 0, 0, 0, stays=[], guesses=[], runs=[]), Budget(3))
    for number in range(4):
        follower.visit("small", number, number)
        follower.wrote("small", 1)
    assert (len(follower.trail.stays), follower.trail.runs, follower.trail.dropped) == (2, [("small", 4)], 2)


def test_a_request_that_waits_fails_or_loses_its_model_has_a_track() -> None:
    cluster = Cluster(engine={"repeat": True}, max_inflight=1)
    made = recorder(cluster)
    first, second = (cluster.submit(request([1, 2, 3], timeout_ns=each)) for each in (None, 50 * MS))
    cluster.deliver_all()
    cluster.kill("small")
    cluster.tick(at_ns=cluster.now_ns + 60 * MS)
    cluster.connect("small")
    cluster.run()
    trails = {trail.request: trail for trail in made.stop(now_ns=cluster.now_ns)[0].trails}
    assert (trails[first].end, trails[second].end) == ("length" if cluster.result(first) else "", "deadline_exceeded")
    assert trails[second].stays == []
    begins = [stay.begin_ns for stay in trails[first].stays]
    assert begins == sorted(begins)
    checked(chrome.document([Recording(About(1, "test", 0, cluster.now_ns), [], list(trails.values()))]))


def test_text_that_is_no_recording_is_refused() -> None:
    for text in ("", "{}", "[1]", '[1, 99, "small", 0, 1, 0, {}]', "[2, 1, 2]"):
        with pytest.raises(ProtocolError, match="recording"):
            Recording.read(text)


@pytest.mark.parametrize("seconds", [0, -1, 60.1, float("nan"), float("inf")])
def test_times_out_of_range_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="at most 60"):
        record("127.0.0.1:1", seconds)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    away = run(app, "timeline", "--url", "127.0.0.1:9", "--output", tmp_path / "trace.json")
    assert (away.exit_code, away.stderr.startswith("error: 127.0.0.1:9: ")) == (2, True)
    folder = run(app, "timeline", "--output", tmp_path)
    assert (folder.exit_code, "is a folder; name a file in it" in folder.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("triton")
def test_one_recording_at_a_time_and_none_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenrouter.triton.recorder import SWITCH, Recorder

    told: list[str] = []

    class Loop:
        def record(self, most: int | None) -> None:
            assert most

        def recorded(self) -> tuple[list[Trail], int]:
            return [], 7

    class Reply:
        def tell(self, text: str) -> None:
            told.append(text)

    made: Any = Recorder("small", Loop(), None)  # type: ignore[arg-type]
    made.start(Reply(), 60_000)
    with pytest.raises(Overloaded, match="ask again"):
        made.start(Reply(), 1)
    made.stop()
    assert [json.loads(text)[2:3] + json.loads(text)[5:6] for text in told] == [["small", 7]]
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(InvalidRequest, match=SWITCH):
        made.start(Reply(), 1)
