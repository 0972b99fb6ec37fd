"""What raises at one request or message, though nothing should, costs that request and no other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import MS, PROMPT, expected_tokens, request, spec
from tokenrouter.errors import InternalError
from tokenrouter.orchestrator.generation import Generation
from tokenrouter.orchestrator.transcript import Transcript
from tokenrouter.policies.cache import Loading, attempt
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Loaded
from tokenrouter.subserver.sequence import ModelSequence
from tokenrouter.subserver.stepped import SteppingRunner


def test_a_request_that_breaks_at_its_time_out_breaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    finish = Transcript.finish

    def fail(transcript: Transcript, update: Update | None) -> Update:
        if transcript._key == broken:
            raise RuntimeError("no text for this one")
        return finish(transcript, update)

    monkeypatch.setattr(Transcript, "finish", fail)
    before, broken, behind = [cluster.submit(request(PROMPT, timeout_ns=MS)) for _ in range(3)]
    endless = cluster.submit(request(PROMPT))
    cluster.deliver_all()
    cluster.tick(at_ns=cluster.now_ns + 2 * MS)
    cluster.run()
    assert isinstance(cluster.error(broken), InternalError)
    assert [cluster.result(key).finish_reason for key in (before, behind)] == ["timeout"] * 2
    assert cluster.result(endless).finish_reason == "stop"
    cluster.assert_conserved()


def test_a_request_that_breaks_at_a_models_return_breaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    before, broken, behind = [cluster.submit(request(PROMPT)) for _ in range(3)]
    cluster.deliver_all()
    visit = Generation.visit

    def fail(generation: Generation, model: str, **details: Any) -> Any:
        if generation.key == broken:
            raise RuntimeError("it goes nowhere")
        return visit(generation, model, **details)

    monkeypatch.setattr(Generation, "visit", fail)
    cluster.kill("small")
    cluster.deliver_all()
    cluster.connect("small")
    cluster.run()
    assert isinstance(cluster.error(broken), InternalError)
    assert [cluster.result(key).tokens for key in (before, behind)] == [expected_tokens(PROMPT, 8)] * 2
    cluster.assert_conserved()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit("a library leaves")])
@pytest.mark.parametrize("waits", [False, True], ids=["loaded", "waits-for-its-policy"])
def test_a_bug_at_one_message_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, waits: bool
) -> None:
    cluster, jobs = Cluster(("small",)), list[tuple[Loading, Loaded]]()
    arrive = SteppingRunner.arrive

    def fail(runner: SteppingRunner, sequence: ModelSequence, *, now_ns: int) -> None:
        if sequence.request == broken:
            raise error
        arrive(runner, sequence, now_ns=now_ns)

    monkeypatch.setattr(SteppingRunner, "arrive", fail)
    if waits:
        cluster.subserver("small").load_with(lambda *job: jobs.append(job))
    before, broken, behind = [cluster.submit(request(PROMPT, policy=spec("single"))) for _ in range(3)]
    cluster.deliver_all()
    for loading, loaded in jobs:
        loaded(attempt(loading), cluster.now_ns)
    cluster.collect()
    cluster.run()
    assert [cluster.result(key).tokens for key in (before, behind)] == [expected_tokens(PROMPT, 8)] * 2
    assert str(error) in str(cluster.error(broken))
    cluster.assert_conserved()
