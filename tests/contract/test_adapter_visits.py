"""The TensorRT-LLM adapter: what a visit asks of the library, and what goes wrong there."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorrt_llm
from tensorrt_llm._double.model import PagedModel
from tensorrt_llm._double.scheduler import Scheduler

from tests.contract.deployments import HANDOFF_IDS, PROMPTS, assert_idle, deployment, engine_of
from tests.support.waiting import until
from tokenrouter.engines.tensorrt_llm import engine as engine_module
from tokenrouter.engines.tensorrt_llm.outputs import Visit
from tokenrouter.engines.tensorrt_llm.visits import ControlIds, WorkerVisit
from tokenrouter.errors import EngineFailed, PolicyFailed, RouterError
from tokenrouter.messages import Outcome, PolicySpec, Sampling
from tokenrouter.offline import TokenRouter
from tokenrouter.policies.base import Policy, PolicyContext, PolicyParams
from tokenrouter.subserver.sequence import ModelSequence

EOS = 256
ALTERNATE = json.dumps({"writers": [0, 1], "trigger": "keep"})


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenRouter]:
    folder = deployment(tmp_path_factory.mktemp("adapter"), selectable_policies="single,scripted")
    with TokenRouter.from_repository(folder) as opened:
        yield opened


def generate(router: TokenRouter, **fields: Any) -> list[Any]:
    return router.generate(PROMPTS, **{"max_tokens": 40, "policy": "single", **fields})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Any]]:
    """Arguments and outputs of the library's calls."""
    whole, calls = tensorrt_llm.LLM.generate_async, []

    def noted(self: Any, inputs: Any, **kwargs: Any) -> Any:
        output = whole(self, inputs, **kwargs)
        calls.append(({"inputs": inputs, **kwargs}, output))
        return output

    monkeypatch.setattr(tensorrt_llm.LLM, "generate_async", noted)
    return calls


def test_what_a_visit_asks_of_the_library(
    router: TokenRouter, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole history each time, one salt for all, blocks worth keeping, and no work for its own sampler."""
    monkeypatch.setattr(engine_of(router)._library, "_offered", {"cache_salt", "kv_cache_retention_config"})
    (result,) = router.generate(
        PROMPTS[:1], max_tokens=6, policy="scripted", policy_params=ALTERNATE, temperature=0.5, seed=1
    )
    prompt = router._driver.entry.tokenizer.encode(PROMPTS[0]).ids
    assert [call["inputs"]["prompt_token_ids"] for call, _ in asked] == [
        [*prompt, *result.tokens[:count]] for count in range(6)
    ]
    assert len({call["cache_salt"] for call, _ in asked}) == 1
    for i, (call, _) in enumerate(asked):
        retention, params = call["kv_cache_retention_config"], call["sampling_params"]
        assert retention.decode_retention_priority == 100
        assert [(r.token_start, r.token_end, r.priority) for r in retention.token_range_retention_configs] == [
            (0, None, 100)
        ]
        # The engine ends it at the other model's id, and looks for no others.
        assert (params.top_k, params.detokenize, params.stop_token_ids) == (1, False, None)
        assert (params.end_id, params.ignore_eos) == (HANDOFF_IDS[1 - i % 2], False)
        assert call["streaming"] is True


def test_an_end_of_the_response_is_followed_by_the_id_that_ends_the_request(
    router: TokenRouter, asked: list[Any]
) -> None:
    """Once per response, unseen by anybody, and not at all where the limit comes with it."""
    numbers = router.statistics["small"].cache
    before = numbers.surplus_tokens
    (result,) = router.generate(PROMPTS[:1], max_tokens=200, policy="single")
    length = len(result.tokens)
    assert (result.finish_reason, result.tokens[-1]) == ("stop", EOS)
    (capped,) = router.generate(PROMPTS[:1], max_tokens=length, policy="single")
    assert (capped.tokens, capped.finish_reason) == (result.tokens, "stop")
    (_, free), (_, exact) = asked
    until(lambda: free.finished and exact.finished, what="the engine ends")
    assert (free.outputs[0].token_ids, free.outputs[0].finish_reason) == ([*result.tokens, HANDOFF_IDS[0]], "stop")
    assert (exact.outputs[0].token_ids, exact.outputs[0].finish_reason) == (result.tokens, "length")
    assert numbers.surplus_tokens == before
    assert_idle(router)


def test_without_an_unused_id_the_engine_ends_at_the_responses_own(tmp_path: Path, asked: list[Any]) -> None:
    folder = deployment(tmp_path, models=["small"], per_model={"small": {"handoff_ids": []}}, end_ids=f"{EOS},18")
    with TokenRouter.from_repository(folder) as router:
        generate(router)
        generate(router, end_id=-1)
    params = [call["sampling_params"] for call, _ in asked[1:]]
    ends = [(each.end_id, each.stop_token_ids, each.ignore_eos) for each in params]
    assert ends == [(EOS, [18], False)] * 4 + [(0, None, True)] * 4


@pytest.mark.parametrize(
    ("models", "decides", "written", "reason", "stopped_at", "told"),
    [
        (2, True, [1, 2], None, None, (Outcome.STAY, (1, 2), "")),
        (2, True, [1, 91], "stop", None, (Outcome.LEAVE, (1,), "b")),
        (2, True, [1, 2], "length", None, (Outcome.LENGTH, (1, 2), "")),
        (2, True, [1, EOS], None, None, (Outcome.STOP, (1, EOS), "")),
        (2, True, [1, EOS], "length", None, (Outcome.STOP, (1, EOS), "")),
        (2, True, [1, 90], None, None, (Outcome.FAILED, (), "policy_failed")),
        (2, True, [1], "cancelled", None, (Outcome.FAILED, (), "engine_failed")),
        (3, True, [1, 92], None, None, (Outcome.LEAVE, (1,), "c")),
        (3, True, [92, 91], "stop", None, (Outcome.LEAVE, (), "c")),
        (2, False, [1, EOS, 90], "stop", None, (Outcome.STOP, (1, EOS), "")),
        (2, False, [1, 90], "stop", None, (Outcome.FAILED, (), "engine_failed")),
        (0, False, [1, EOS], "stop", None, (Outcome.STOP, (1, EOS), "")),
        (0, False, [1], "stop", 18, (Outcome.STOP, (1, 18), "")),
    ],
)
def test_what_the_ids_of_an_output_mean(
    models: int, decides: bool, written: list[int], reason: str, stopped_at: int | None, told: tuple[Any, ...]
) -> None:
    names = ("a", "b", "c")[: models or 2]
    policy = (_Decides if decides else Policy)(PolicyParams(), PolicyContext(names))
    ids = ControlIds.of(policy, "a", range(90, 90 + models))
    task = SimpleNamespace(
        ids=ids, models=names, model="a", policy=PolicySpec("p"), sampling=Sampling(9, end_ids=(EOS, 18))
    )
    completion = SimpleNamespace(token_ids=written, finish_reason=reason, stop_reason=stopped_at)
    visit = Visit(1, None, task, [], 9, SimpleNamespace(outputs=[completion]))  # type: ignore[arg-type]
    news = visit.news()
    assert news is not None
    says = news.error.slug if isinstance(news.error, RouterError) else news.target
    assert (news.outcome, news.tokens, says) == told
    assert visit.news() is None


class _Decides(Policy):
    name = "decides"

    def route(self, batch: Any) -> Any: ...


def test_keywords_that_a_version_lacks_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tensorrt_llm.LLM.generate_async

    def older(self: Any, inputs: Any, sampling_params: Any = None, streaming: bool = False) -> Any:
        return whole(self, inputs, sampling_params=sampling_params, streaming=streaming)

    monkeypatch.setattr(tensorrt_llm.LLM, "generate_async", older)
    folder = deployment(tmp_path, models=["small"])
    with caplog.at_level(logging.WARNING), TokenRouter.from_repository(folder) as router:
        assert generate(router)
    assert "generate_async has no cache_salt" in caplog.text
    assert "generate_async has no kv_cache_retention_config" in caplog.text


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_prompt_that_the_engine_refuses_fails_its_request_with_the_reason(
    router: TokenRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("The prompt is not to my liking")

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm.LLM, "generate_async", refuses)
        with pytest.raises(EngineFailed, match="ValueError: The prompt is not to my liking"):
            generate(router)
    assert_idle(router)


def test_an_executor_that_fails_a_step_fails_its_requests(router: TokenRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, rows: Any) -> Any:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(PagedModel, "run", fails)
        with pytest.raises(EngineFailed, match="device lost"):
            generate(router)
    assert_idle(router)
    assert generate(router)


@pytest.mark.parametrize(
    ("handoff_ids", "policy", "error"),
    [(HANDOFF_IDS, "single", EngineFailed), (HANDOFF_IDS, "scripted", PolicyFailed), ([], "single", None)],
)
def test_a_visit_that_fails_in_the_worker_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handoff_ids: list[int], policy: str, error: type[Exception] | None
) -> None:
    """Without an unused id to say so, its response ends there."""
    choose = WorkerVisit.choose

    def fails(self: Any, row: Any, history: Any) -> Any:
        if len(history) == 10:
            raise RuntimeError("out of memory")
        return choose(self, row, history)

    per_model = {"small": {"handoff_ids": handoff_ids}}
    folder = deployment(tmp_path, per_model=per_model, selectable_policies="single,scripted")
    with TokenRouter.from_repository(folder) as router:
        params = json.dumps({"writers": [0]} if policy == "scripted" else {})
        fields = {"max_tokens": 60, "end_id": EOS, "policy": policy, "policy_params": params}
        want = router.generate([[20] * 30], **fields)
        monkeypatch.setattr(WorkerVisit, "choose", fails)
        prompts = [[20] * 30, [20] * 8]
        if error is None:
            got = router.generate(prompts, **fields)
            assert (len(got[1].tokens), got[1].finish_reason) == (3, "stop")
        else:
            updates = router.stream(prompts[0], **fields)
            next(updates)
            with pytest.raises(error, match="failed in"):
                router.generate(prompts[1:], **fields)
            got = [[update.result for update in updates][-1]]
        assert [got[0].tokens] == [result.tokens for result in want]
        assert_idle(router)


def visit_of(engine: Any, ticket: int) -> None:
    """Submits a visit as a subserver does."""
    spec, policy = PolicySpec("single"), Policy(PolicyParams(), PolicyContext(("small", "large")))
    sequence = ModelSequence(
        model="small", tokens=[20, 21], prompt_tokens=2, sampling=Sampling(9), policy=policy, spec=spec
    )
    sequence.handle = engine.open(kv_tokens=11, prompt_tokens=2)
    sequence.arrive(visit=1, source="", state={})
    sequence.then = "small"
    engine.submit([(ticket, sequence)])


def test_who_follows_an_abort_without_an_answer_gives_up(router: TokenRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double drops what is aborted before it is active."""
    monkeypatch.setattr(engine_module, "ABORT_GRACE_S", 0.2)
    engine = engine_of(router)
    assert not engine._tasks
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "activate", lambda self: [])
        visit_of(engine, 10**6)
        until(lambda: engine._tasks, what="the visit starts")
        engine.cancel(10**6)
        until(lambda: not engine._tasks, what="who follows the visit gives up")
    assert not engine._visits


def test_a_worker_that_dies_fails_visits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    folder = deployment(tmp_path, "single", {"model": "small"}, models=["small"])
    router = TokenRouter.from_repository(folder)
    try:
        (pid,) = engine_of(router)._workers._files
        updates = router.stream(PROMPTS[0], max_tokens=900, end_id=-1)
        next(updates)
        os.kill(pid, 9)
        for says in ("of TensorRT-LLM ended; load the model again", f"worker process {pid}"):
            with pytest.raises(EngineFailed, match=says):
                list(updates)
            updates = router.stream(PROMPTS[0], max_tokens=9)
        assert_idle(router)
    finally:
        router.close()
