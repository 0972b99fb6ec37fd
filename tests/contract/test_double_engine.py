"""What the double pins of scheduler, KV cache and worker process. Each behaviour is also broken once, see conftest."""

from __future__ import annotations

import asyncio
import datetime
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensorrt_llm import LLM
from tensorrt_llm._double.model import POOL
from tensorrt_llm.executor import RequestError
from tensorrt_llm.llmapi import ContextChunkingPolicy, CudaGraphConfig, KvCacheRetentionConfig, SchedulerConfig

from tests.contract.calls import BLOCK, PROMPT, STOP, build, finish, iterations, run, submit, tags
from tests.contract.processors import CALLS, GATES, Fail, Force, Gate, Record
from tokenrouter.engines.tensorrt_llm.facts import WORKER_COMMAND

EQUAL = SchedulerConfig(context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS)

# --- scheduler -------------------------------------------------------------------------------------------------------


def together(llm: LLM, prompts: Sequence[list[int]], salt: str) -> list[tuple[int, int, int]]:
    """Iterations of requests that arrive while another one decodes; it goes on behind them."""
    gate = submit(llm, salt=next(tags), logits_processor=Gate(salt), max_tokens=6)
    GATES[salt].release(1)
    while len(CALLS[salt]) < 2:
        time.sleep(0.001)
    results = [submit(llm, prompt, salt, max_tokens=1) for prompt in prompts]
    GATES[salt].release(100)
    for result in [*results, gate]:
        assert result.result(timeout=30).outputs[0].finish_reason == "length"
    return iterations(llm)


@pytest.mark.pins("batched")
def test_ready_requests_share_a_forward_pass(llm: LLM, salt: str) -> None:
    iterations(llm)
    assert together(llm, [[i] for i in range(5)], salt)[2] == (5, 1, 5)


@pytest.mark.pins("whole_prompt_charged")
def test_a_resumed_request_is_charged_its_whole_prompt(salt: str) -> None:
    """Four histories of which all but a token is cached: two fit, and a decode that comes behind them waits as well."""
    histories = [[i] * 100 for i in range(4)]
    with build() as llm:
        for history in histories:
            finish(llm, history, salt, max_tokens=1)
        iterations(llm)
        assert together(llm, histories, salt)[2:5] == [(2, 1, 2), (2, 1, 2), (0, 1, 0)]


@pytest.mark.pins("equal_progress")
def test_equal_progress_takes_in_all_at_once(salt: str) -> None:
    """Each is given blocks in turn, and what is found in the cache lies in front of what it is given."""
    histories = [[i] * 100 for i in range(4)]
    with build(enable_chunked_prefill=True, scheduler_config=EQUAL) as llm:
        for history in histories:
            finish(llm, history, salt, max_tokens=1)
        iterations(llm)
        assert together(llm, histories, salt)[2:4] == [(4, 1, 4), (0, 1, 0)]


@pytest.mark.pins("chunks_processed")
@pytest.mark.parametrize("policy", [EQUAL, SchedulerConfig()])
def test_a_long_prompt_is_prefilled_in_chunks_with_a_call_after_each(
    reference: Any, salt: str, policy: SchedulerConfig
) -> None:
    prompt = [i % 200 for i in range(5 * BLOCK + 3)]
    with build(max_num_tokens=2 * BLOCK + 7, enable_chunked_prefill=True, scheduler_config=policy) as llm:
        output = finish(llm, prompt, salt, logits_processor=Record(salt), max_tokens=2).outputs[0]
        assert output.token_ids == reference(prompt, 2)
        assert [call[3] for call in CALLS[salt]] == [[prompt]] * 3 + [[prompt + output.token_ids[:1]]]
        assert iterations(llm) == [(1, 0, 32), (1, 0, 32), (1, 0, 19), (0, 1, 0)]


def test_requests_wait_until_their_worst_case_fits(reference: Any) -> None:
    with build(cache={"max_tokens": 3 * BLOCK}) as llm:
        results = [submit(llm, [i, i + 1], next(tags), max_tokens=20) for i in range(6)]
        for i, result in enumerate(results):
            assert result.result(timeout=30).outputs[0].token_ids == reference([i, i + 1], 20)
        assert max(contexts + decodes for contexts, decodes, _ in iterations(llm)) == 1
        with pytest.raises(RequestError, match="never fit"):
            finish(llm, max_tokens=100)


# --- KV cache --------------------------------------------------------------------------------------------------------


def resumed(llm: LLM, salt: str, new: Sequence[int], **first: Any) -> tuple[int, list[int]]:
    """Runs one visit, resumes it with new tokens: how many were computed, and the tokens of the second."""
    prompt = PROMPT + finish(llm, salt=salt, **first).outputs[0].token_ids + list(new)
    second = finish(llm, prompt, salt)
    return len(prompt) - second.cached_tokens, second.outputs[0].token_ids


@pytest.mark.pins("reuse", "generated_stored")
@pytest.mark.parametrize("new", [[3], [3, 4, 5], list(range(20))])
def test_after_a_forced_stop_only_the_new_tokens_are_computed(
    llm: LLM, reference: Any, salt: str, new: list[int]
) -> None:
    handed_off = {"stop_token_ids": [STOP], "logits_processor": Force(None, None, None, STOP)}
    computed, output = resumed(llm, salt, new, **handed_off)
    assert computed == len(new)
    assert output == reference(PROMPT + reference(PROMPT, 3) + new, 8)


@pytest.mark.pins("last_token_not_stored")
def test_after_a_length_end_one_more_token_is_computed(llm: LLM, salt: str) -> None:
    assert resumed(llm, salt, [3, 4], max_tokens=5)[0] == 3


@pytest.mark.pins("reuse_capped", "stored_before_answer")
def test_at_least_one_prompt_token_is_computed(llm: LLM, salt: str) -> None:
    cached = [finish(llm, salt=salt).cached_tokens for _ in range(3)]
    assert cached == [0, len(PROMPT) - 1, len(PROMPT) - 1]


@pytest.mark.pins("partial_reuse")
def test_without_partial_reuse_only_whole_blocks_count(salt: str, reference: Any) -> None:
    prompt = list(range(BLOCK + 5))
    with build(cache={"enable_partial_reuse": False}) as llm:
        assert finish(llm, prompt, salt).cached_tokens == 0
        second = finish(llm, prompt, salt)
        assert (second.cached_tokens, second.outputs[0].token_ids) == (BLOCK, reference(prompt, 8))


def test_without_block_reuse_nothing_is_cached(salt: str) -> None:
    with build(cache={"enable_block_reuse": False}) as llm:
        assert [finish(llm, salt=salt).cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.pins("salted")
def test_other_salts_share_nothing(llm: LLM, salt: str) -> None:
    finish(llm, salt=salt)
    assert finish(llm, salt=next(tags)).cached_tokens == 0


@pytest.mark.pins("stored_at_the_end")
def test_of_a_running_request_only_the_prompt_is_shared(llm: LLM, reference: Any, salt: str) -> None:
    prompt = list(range(BLOCK + 2))
    written = reference(prompt, 2 * BLOCK)
    first = submit(llm, prompt, salt, logits_processor=Gate(salt), max_tokens=3 * BLOCK)
    GATES[salt].release(2 * BLOCK)
    while len(CALLS[salt]) <= 2 * BLOCK:
        time.sleep(0.001)
    second = submit(llm, prompt + written, salt)
    GATES[salt].release(100)
    assert second.result(timeout=30).cached_tokens == BLOCK
    assert first.result(timeout=30).outputs[0].token_ids[: 2 * BLOCK] == written
    assert second.outputs[0].token_ids == reference(prompt + written, 8)


def cached_at_last(salt: str, blocks: int, **first: Any) -> tuple[int, int]:
    """Cached tokens of the newest and of the first of several prompts of two blocks each, in a cache that is full."""
    prompts = [[i] * (BLOCK + 1) for i in range(4)]
    with build(cache={"max_tokens": blocks * BLOCK}) as llm:
        finish(llm, prompts[0], salt, max_tokens=2, **first)
        time.sleep(0.01)
        for prompt in prompts[1:]:
            finish(llm, prompt, salt, max_tokens=2)
        newest, oldest = (finish(llm, prompts[i], salt, max_tokens=2).cached_tokens for i in (3, 0))
    return newest, oldest


def kept(duration_ms: int | None = None) -> KvCacheRetentionConfig:
    duration = None if duration_ms is None else datetime.timedelta(milliseconds=duration_ms)
    everything = KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 100, duration)
    return KvCacheRetentionConfig([everything], 100, duration)


@pytest.mark.pins("evicts_least_recent")
def test_the_block_used_longest_ago_is_evicted(salt: str) -> None:
    assert cached_at_last(salt, 5) == (BLOCK, 0)


@pytest.mark.pins("evicts_low_priority_first")
def test_high_priority_blocks_outlive_others(salt: str) -> None:
    assert cached_at_last(salt, 6, kv_cache_retention_config=kept())[1] == BLOCK


def test_a_priority_ends_with_its_duration(salt: str) -> None:
    assert cached_at_last(salt, 5, kv_cache_retention_config=kept(1))[1] == 0


def test_all_blocks_come_back(salt: str) -> None:
    generator = torch.Generator().manual_seed(3)
    with build(cache={"max_tokens": 20 * BLOCK}) as llm:
        for _ in range(40):
            length, count = (int(x) for x in torch.randint(1, 40, (2,), generator=generator))
            prompt = torch.randint(0, 3, (length,), generator=generator).tolist()
            finish(llm, prompt, salt, max_tokens=count, logits_processor=Force(None, 1, None, 2, STOP))
        finish(llm, max_tokens=1)
        stats = llm.get_stats()[-1]["kvCacheStats"]
        assert (stats["maxNumBlocks"], stats["freeNumBlocks"]) == (20, 20)


def pool() -> int:
    """Blocks of the running step's KV manager, as code in a processor can find it."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_locals.get("resource_manager") is None:
        frame = frame.f_back
    if frame is None:
        return 0
    managers = frame.f_locals["resource_manager"].resource_managers
    return int(managers["KV_CACHE_MANAGER"].get_kv_cache_stats().max_num_blocks)


class Pool(Force):
    """Writes the number of blocks."""

    def __call__(self, req_id: int, logits: Any, token_ids: Any, *more: Any) -> None:
        self.ids = (pool(),)
        super().__call__(req_id, logits, token_ids)


@pytest.mark.pins("pool_capped", "manager_in_frames")
def test_a_processor_can_see_how_large_the_pool_really_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL, "77")
    with build() as llm:
        assert finish(llm, max_tokens=1, logits_processor=Pool()).outputs[0].token_ids == [77]


@pytest.mark.pins("padding_takes_a_block")
def test_padded_graphs_take_a_block() -> None:
    with build(cache={"max_tokens": 3 * BLOCK}, cuda_graph_config=CudaGraphConfig(enable_padding=True)) as llm:
        finish(llm, max_tokens=1)
        assert llm.get_stats()[0]["kvCacheStats"]["freeNumBlocks"] == 2


# --- statistics of iterations ----------------------------------------------------------------------------------------


def told(llm: LLM) -> list[tuple[int, ...]]:
    """Active and new requests, context and decoding ones of each iteration since the last call."""
    names = ("numActiveRequests", "numNewActiveRequests")
    inside = ("numContextRequests", "numGenRequests")
    return [
        (*(each[name] for name in names), *(each["inflightBatchingStats"][name] for name in inside))
        for each in llm.get_stats()
    ]


@pytest.mark.pins("iterations_told", "iteration_includes_wait")
def test_the_first_iteration_counts_the_time_that_the_loop_waited(llm: LLM) -> None:
    finish(llm, max_tokens=3)
    llm.get_stats()
    time.sleep(0.3)
    finish(llm, max_tokens=3)
    first, *more = llm.get_stats()
    assert first["iterLatencyMS"] >= 250
    assert (first["numActiveRequests"], first["numNewActiveRequests"]) == (1, 1)
    assert [(each["numActiveRequests"], each["numNewActiveRequests"]) for each in more] == [(1, 0)] * 2


@pytest.mark.pins("idle_iterations_repeat")
def test_an_iteration_without_a_step_repeats_the_numbers_of_the_one_before(llm: LLM) -> None:
    finish(llm, max_tokens=2)
    told(llm)
    llm._executor.worker.put(10**9)  # an abort of nobody wakes the loop
    end = time.monotonic() + 10
    seen: list[tuple[int, ...]] = []
    while not seen and time.monotonic() < end:
        seen = told(llm)
    assert seen == [(0, 0, 0, 1)]


@pytest.mark.pins("iterations_end", "iterations_of_a_loop")
def test_in_a_loop_they_are_iterated_over_until_none_comes_and_again_after_a_submission() -> None:
    async def counted(llm: LLM, *, submits: bool) -> int:
        if submits:
            await submit(llm, max_tokens=3, streaming=True).__anext__()
            await asyncio.sleep(0.3)
        return len([each async for each in llm.get_stats_async(0.05)])

    async def all_of(llm: LLM) -> list[int]:
        counts = [await counted(llm, submits=True)]
        llm._executor.worker.put(10**9)
        await asyncio.sleep(0.3)
        return [*counts, await counted(llm, submits=False), await counted(llm, submits=True)]

    with build() as llm:
        assert run(all_of(llm)) == [3, 0, 4]
        with pytest.raises(TypeError):
            llm.get_stats()


@pytest.mark.pins("requests_timed")
def test_a_request_tells_when_its_first_token_came_and_in_which_iteration(llm: LLM) -> None:
    llm.get_stats()
    time.sleep(0.3)
    metrics = finish(llm, max_tokens=3, return_perf_metrics=True).outputs[0].request_perf_metrics
    first = llm.get_stats()[0]
    times = metrics.timing_metrics
    took_ms = (times.first_token_time - times.first_scheduled_time).total_seconds() * 1e3
    assert metrics.first_iter == first["iter"]
    assert 0 < took_ms < first["iterLatencyMS"] - 250
    assert finish(llm, max_tokens=3).outputs[0].request_perf_metrics is None


# --- worker process --------------------------------------------------------------------------------------------------


@pytest.mark.pins("workers_named", "dead_worker_silent")
def test_by_default_the_loop_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, reference: Any, salt: str
) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    with build() as llm:
        mine = Record(salt)
        assert finish(llm, salt=salt, logits_processor=mine).outputs[0].token_ids == reference(PROMPT, 8)
        assert mine.count == 0
        with pytest.raises((TypeError, AttributeError), match="pickle"):
            submit(llm, logits_processor=lambda *_: None)
        with pytest.raises(RequestError, match="no luck"):
            finish(llm, logits_processor=Fail())
        running = submit(llm, salt=salt, max_tokens=500, streaming=True)
        running.abort()
        assert running.result(timeout=30).outputs[0].finish_reason == "cancelled"
        worker = llm._executor.worker._process
        assert WORKER_COMMAND in worker.args[-1]
        waiting = submit(llm, salt=salt, max_tokens=900)
        worker.kill()
        assert worker.wait(timeout=10)
        llm._executor.worker._reader.join()
        with pytest.raises(RuntimeError, match="worker process ended"):
            submit(llm)
        assert waiting._queue.empty()


def test_a_model_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    with pytest.raises(RuntimeError, match=str(tmp_path)):
        build(model=tmp_path, max_seq_len=10)
