"""The TensorRT-LLM adapter: step times from the statistics of the library's iterations."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.deployments import PROMPTS, deployment, engine_of
from tests.support.waiting import until
from tokenrouter.engines.base import EngineStep
from tokenrouter.engines.tensorrt_llm.iterations import MOST_PENDING, Iterations, records
from tokenrouter.offline import TokenRouter

ONE_TOKEN = json.dumps({"writers": [0, 1], "trigger": "first", "visit_tokens": 1})
"""The large model's visits end by their limit."""


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenRouter]:
    folder = deployment(tmp_path_factory.mktemp("adapter"), selectable_policies="single,scripted")
    with TokenRouter.from_repository(folder) as opened:
        yield opened


def record(
    iteration: int, ms: float, *, active: int, new: int, contexts: int = 0, decodes: int = 0, tokens: int = 0
) -> dict[str, Any]:
    """Statistics of an iteration, as the library gives them."""
    batching = {"numContextRequests": contexts, "numGenRequests": decodes, "numCtxTokens": tokens}
    counts = {"numActiveRequests": active, "numNewActiveRequests": new}
    return {"iter": iteration, "iterLatencyMS": ms, **counts, "inflightBatchingStats": batching}


def output(iteration: int | None, ms: float) -> Any:
    """The final output of a request whose first token came in that iteration, so long after it was scheduled."""
    start = timedelta(seconds=100)
    times = SimpleNamespace(first_scheduled_time=start, first_token_time=start + timedelta(milliseconds=ms))
    return SimpleNamespace(request_perf_metrics=SimpleNamespace(first_iter=iteration, timing_metrics=times))


def test_an_iteration_is_a_step_if_nobody_had_to_be_waited_for() -> None:
    iterations = Iterations()
    assert iterations.told(record(7, 4.0, active=3, new=1, contexts=1, decodes=2, tokens=6)) == EngineStep(3, 5, 0.004)
    # All new: the loop may have waited.
    assert iterations.told(record(8, 900.0, active=2, new=2, contexts=2, tokens=2)) is None
    # No step: numbers of an earlier one.
    assert iterations.told(record(9, 900.0, active=1, new=0, decodes=2)) is None
    assert iterations.told(record(10, 900.0, active=0, new=0, decodes=2)) is None


@pytest.mark.parametrize("request_first", [True, False])
def test_where_all_are_new_a_request_tells_the_time_of_its_first_step(request_first: bool) -> None:
    iterations = Iterations()
    told = record(8, 900.0, active=2, new=2, contexts=2, tokens=5)
    steps = [iterations.timed(output(8, 3.0))] if request_first else []
    steps += [iterations.told(told)]
    steps += [iterations.timed(output(8, 3.0)), iterations.timed(output(8, 3.0))]
    assert [step for step in steps if step is not None] == [EngineStep(2, 3, 0.003)]
    # A prompt of several chunks was scheduled for the first time in an earlier iteration.
    iterations.told(record(9, 5.0, active=1, new=1, contexts=1, tokens=9))
    assert iterations.timed(output(9, 80.0)) is None
    assert iterations.timed(output(None, 1.0)) is iterations.timed(SimpleNamespace(request_perf_metrics=None)) is None


def test_what_never_finds_its_other_half_is_forgotten() -> None:
    iterations = Iterations()
    for number in range(3 * MOST_PENDING):
        iterations.told(record(2 * number, 5.0, active=1, new=1, contexts=1, tokens=1))
        iterations.timed(output(2 * number + 1, 1.0))
    assert len(iterations._untimed) == len(iterations._times) == MOST_PENDING


def test_an_executor_that_is_asked_by_rpc_is_asked_in_a_thread() -> None:
    threads: list[str] = []

    def get_stats(timeout: float) -> list[dict[str, Any]]:
        threads.append(threading.current_thread().name)
        return [{"iter": 1}, {"iter": 2}]

    llm = SimpleNamespace(_executor=SimpleNamespace(rpc_client=object()), get_stats=get_stats)

    async def asked() -> list[dict[str, Any]]:
        return [each async for each in records(llm)]

    assert asyncio.run(asked()) == [{"iter": 1}, {"iter": 2}]
    assert threads != [threading.current_thread().name]


def test_the_profiler_gets_step_times_by_batch_size(router: TokenRouter) -> None:
    statistics = router._driver.subservers["small"].statistics
    wanted = {1, len(PROMPTS)}

    def timed() -> bool:
        for prompts in (PROMPTS, PROMPTS[:1]):
            router.generate(prompts, max_tokens=12, policy="single", end_id=-1)
            time.sleep(0.6)
        return wanted <= statistics.step_times.by_batch.keys()

    until(timed, what="step times")
    assert all(0 < sums.seconds / sums.steps < 5 for sums in statistics.step_times.by_batch.values())


def test_steps_of_a_model_that_writes_one_token_a_visit_are_timed(router: TokenRouter) -> None:
    """All its requests are new in every iteration, so their own times are needed."""
    sums = router._driver.subservers["large"].statistics.step_times.by_batch[1]
    before, rounds = sums.steps, 3
    for _ in range(rounds):
        router.generate(PROMPTS[:1], max_tokens=12, policy="scripted", policy_params=ONE_TOKEN, end_id=-1)
        time.sleep(0.6)
    # Those of the last round may still be on their way.
    assert sums.steps - before >= (rounds - 1) * 6
    assert 0 < sums.seconds < 60


def test_without_statistics_nobody_asks(tmp_path: Path) -> None:
    folder = deployment(tmp_path, per_model={"small": {"enable_iter_perf_stats": False}})
    with TokenRouter.from_repository(folder) as router:
        router.generate(PROMPTS[:1], max_tokens=3, policy="single")
        assert engine_of(router)._asking is None
        assert engine_of(router, "large")._asking is not None
