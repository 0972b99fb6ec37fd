"""What the double pins of TensorRT-LLM, behaviour by behaviour (conftest.py: each is also broken once)."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import itertools
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorrt_llm import LLM, SamplingParams, _behaviour
from tensorrt_llm._torch.models import modeling_utils
from tensorrt_llm._torch.models.modeling_qwen3 import Qwen3ForCausalLM
from tensorrt_llm.executor import RequestError
from tensorrt_llm.llmapi import KvCacheConfig, KvCacheRetentionConfig, TorchLlmArgs

from tests.contract import stubs
from tests.contract.double import DOUBLE, double_environment
from tests.contract.processors import CALLS, GATES, Fail, Force, Gate, Record, plain, three
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.tensorrt_llm import facts
from tokenrouter.engines.torch import KvCacheConfig as TorchKvCacheConfig
from tokenrouter.engines.torch import TorchEngine, TorchEngineConfig

SMALL = Path(__file__).parents[2] / "model_repository" / "small" / "1"
END, STOP = 261, 258  # ids that the model never chooses by itself
VOCABULARY = 262
PROMPT = [16, 28, 17, 2, 18]
BLOCK = 16

tags = (f"tag {i}" for i in itertools.count())


def build(**changes: Any) -> LLM:
    cache = {"tokens_per_block": BLOCK, "max_tokens": 2048, **changes.pop("cache", {})}
    defaults = {"skip_tokenizer_init": True, "disable_overlap_scheduler": True, "max_num_tokens": 256}
    return LLM(model=SMALL, **{**defaults, "kv_cache_config": KvCacheConfig(**cache), **changes})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with build() as llm:
        yield llm


@pytest.fixture(scope="module")
def overlapping() -> Iterator[LLM]:
    with build(disable_overlap_scheduler=False) as llm:
        yield llm


@pytest.fixture
def salt() -> str:
    """Keeps the blocks of one test from the others."""
    return next(tags)


@pytest.fixture(scope="module")
def reference() -> Callable[[Sequence[int], int], list[int]]:
    """Greedy tokens of the torch engine."""
    cache = TorchKvCacheConfig(tokens_per_block=BLOCK, max_tokens=1024)
    engine = TorchEngine.from_folder(SMALL, TorchEngineConfig(kv_cache_config=cache, device="cpu"))

    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        handle = engine.open(kv_tokens=len(prompt) + count, prompt_tokens=len(prompt))
        new, out = list(prompt), []
        for _ in range(count):
            new = [int(engine.step([EngineRow(handle, new)]).logits[0].argmax())]
            out += new
        engine.close(handle)
        return out

    return greedy


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """A coroutine with an event loop, bounded in time."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(bounded())


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"end_id": END, "max_tokens": 8, "detokenize": False, **changes})


def submit(llm: LLM, prompt: Sequence[int] = PROMPT, salt: str | None = None, **changes: Any) -> Any:
    call = {name: changes.pop(name) for name in ("streaming", "kv_cache_retention_config") if name in changes}
    return llm.generate_async(inputs=list(prompt), sampling_params=params(**changes), cache_salt=salt, **call)


def finish(llm: LLM, prompt: Sequence[int] = PROMPT, salt: str | None = None, **changes: Any) -> Any:
    return submit(llm, prompt, salt, **changes).result(timeout=30)


def tokens(llm: LLM, prompt: Sequence[int] = PROMPT, **changes: Any) -> list[int]:
    return list(finish(llm, prompt, next(tags), **changes).outputs[0].token_ids)


# --- construction and parameters ------------------------------------------------------------------------------------


@pytest.mark.pins("unknown_arguments_refused")
def test_llm_refuses_unknown_arguments() -> None:
    with pytest.raises(ValueError, match="max_batchsize"):
        build(max_batchsize=3).shutdown()


def test_configuration_objects_refuse_unknown_fields() -> None:
    with pytest.raises(ValueError, match="block_size"):
        KvCacheConfig(block_size=3)
    with pytest.raises(TypeError):
        KvCacheConfig("positional") if False else KvCacheRetentionConfig()
    with pytest.raises(RuntimeError, match="Invalid priority"):
        KvCacheRetentionConfig([], 101)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="speculative_config"):
        build(speculative_config=object())
    with pytest.raises(NotImplementedError, match="n, best_of"):
        SamplingParams(n=2, temperature=1.0)


@pytest.mark.pins("needs_gpu_for_arguments")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_arguments_cannot_be_constructed_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="GPU"):
        TorchLlmArgs(model=SMALL)


@pytest.mark.pins("unknown_fields_refused")
def test_sampling_params_refuse_unknown_fields() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        SamplingParams(nonsense=1)


def test_sampling_params_have_the_fields_of_the_table() -> None:
    fields = SamplingParams(**dict.fromkeys(("top_k", "stop")))
    assert fields.max_tokens == 32
    assert (fields.detokenize, fields.pad_id, fields.seed) == (True, None, None)
    assert tuple(SamplingParams.__dataclass_fields__) == facts.surface(stubs_path("SamplingParams")).names
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=1.5)


def stubs_path(name: str) -> str:
    return next(surface.path for surface in facts.SURFACES if surface.name == name)


@pytest.mark.pins("end_id_needed")
def test_without_a_tokenizer_end_id_is_needed(llm: LLM) -> None:
    with pytest.raises(ValueError, match="end_id"):
        submit(llm, end_id=None)


@pytest.mark.pins("strings_ignored")
def test_stop_strings_are_not_tokenised_once_end_id_is_set(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="stop_token_ids"):
        submit(llm, stop=["x"])


def test_with_a_tokenizer_text_goes_in_and_comes_out() -> None:
    with build(skip_tokenizer_init=False) as llm:
        output = llm.generate("1+1", SamplingParams(max_tokens=5, end_id=END))
        assert output.prompt_token_ids
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_an_llm_cannot_be_pickled(llm: LLM) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(llm)


def test_generate_async_has_the_signature_of_the_table() -> None:
    names = tuple(inspect.signature(LLM.generate_async).parameters)
    assert names == ("self", *facts.surface("tensorrt_llm.LLM.generate_async").names)
    assert "trace_headers" not in names


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.pins("returns_at_once")
def test_generate_async_returns_before_the_first_token(llm: LLM, salt: str) -> None:
    result = submit(llm, salt=salt, logits_processor=Gate(salt, seconds=2), max_tokens=1)
    assert llm._executor.unanswered(result.request_id)
    GATES[salt].release()
    assert result.result(timeout=30).finished


@pytest.mark.pins("needs_running_loop")
def test_async_iteration_needs_a_loop_at_submission(llm: LLM) -> None:
    result = submit(llm, max_tokens=1, streaming=True)
    while llm._executor.unanswered(result.request_id):
        time.sleep(0.001)

    async def read() -> None:
        async for _ in result:
            pass

    with pytest.raises(AssertionError, match="event loop"):
        run(read())


@pytest.mark.pins("same_object", "cumulative")
def test_streaming_yields_the_same_cumulative_object(llm: LLM, reference: Any, salt: str) -> None:
    async def read() -> list[tuple[int, list[int], list[int], bool]]:
        result = submit(llm, salt=salt, streaming=True)
        seen = []
        async for output in result:
            completion = output.outputs[0]
            assert output is result
            seen.append((list(completion.token_ids), list(completion.token_ids_diff), output.finished))
        return seen

    want = reference(PROMPT, 8)
    assert run(read()) == [(want[: i + 1], [want[i]], i == 7) for i in range(8)]


def test_without_streaming_one_response_brings_everything(llm: LLM, reference: Any) -> None:
    async def read() -> Any:
        return [list(output.outputs[0].token_ids) async for output in submit(llm)]

    assert run(read()) == [reference(PROMPT, 8)]


def test_awaiting_and_waiting(llm: LLM, reference: Any) -> None:
    async def read() -> Any:
        return (await submit(llm)).outputs[0].token_ids

    assert run(read()) == finish(llm).outputs[0].token_ids == reference(PROMPT, 8)


def test_stream_interval(salt: str, reference: Any) -> None:
    async def read(llm: LLM) -> Any:
        return [list(output.outputs[0].token_ids_diff) async for output in submit(llm, streaming=True)]

    with build(stream_interval=3) as llm:
        want = reference(PROMPT, 8)
        assert run(read(llm)) == [want[:1], want[1:3], want[3:6], want[6:]]


def test_logprobs_hold_the_best_and_the_sampled_token(llm: LLM, salt: str) -> None:
    output = finish(llm, salt=salt, logprobs=2, logits_processor=Force(None, 200)).outputs[0]
    assert [len(entry) for entry in output.logprobs] == [2, 3, 3, 3, 3, 3, 3, 3] or len(output.logprobs) == 8
    first = output.logprobs[0][output.token_ids[0]]
    assert first.rank == 1
    assert -1 < first.logprob <= 0
    assert all(token in entry for token, entry in zip(output.token_ids, output.logprobs, strict=True))


# --- how a response ends --------------------------------------------------------------------------------------------


@pytest.mark.pins("stop_ids_cut")
def test_a_stop_id_ends_the_response_and_is_cut(llm: LLM, reference: Any, salt: str) -> None:
    async def read() -> tuple[list[list[int]], Any]:
        result = submit(llm, salt=salt, streaming=True, stop_token_ids=[STOP], logits_processor=Force(None, None, STOP))
        return [list(output.outputs[0].token_ids_diff) async for output in result], result.outputs[0]

    diffs, output = run(read())
    want = reference(PROMPT, 2)
    assert output.token_ids == want
    assert (output.finish_reason, output.stop_reason) == ("stop", STOP)
    assert diffs == [[want[0]], [want[1]], []]


def test_a_stop_id_is_kept_on_request(llm: LLM, salt: str) -> None:
    output = finish(
        llm, salt=salt, stop_token_ids=[STOP], logits_processor=Force(STOP), include_stop_str_in_output=True
    ).outputs[0]
    assert (output.token_ids, output.stop_reason) == ([STOP], STOP)


@pytest.mark.pins("end_id_kept", "stop_reason_only_for_stop_words")
def test_the_end_id_stays_and_gives_no_stop_reason(llm: LLM, salt: str) -> None:
    output = finish(llm, salt=salt, stop_token_ids=[STOP], logits_processor=Force(7, END)).outputs[0]
    assert output.token_ids == [7, END]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


@pytest.mark.pins("end_id_first")
def test_the_end_id_is_tested_before_the_length(llm: LLM, salt: str) -> None:
    output = finish(llm, salt=salt, max_tokens=2, logits_processor=Force(7, END)).outputs[0]
    assert (output.finish_reason, output.token_ids) == ("stop", [7, END])


@pytest.mark.pins("length_before_stop_words")
def test_the_length_is_tested_before_stop_ids(llm: LLM, salt: str) -> None:
    output = finish(llm, salt=salt, max_tokens=2, stop_token_ids=[STOP], logits_processor=Force(7, STOP)).outputs[0]
    assert output.token_ids == [7, STOP]
    assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_ignore_eos_and_min_tokens(llm: LLM, salt: str) -> None:
    ignoring = finish(llm, salt=salt, max_tokens=3, ignore_eos=True, logits_processor=Force(END)).outputs[0]
    assert (ignoring.token_ids, ignoring.finish_reason) == ([END] * 3, "length")
    bias = torch.zeros(VOCABULARY)
    bias[END] = 1e4
    output = finish(llm, salt=salt, min_tokens=3, embedding_bias=bias).outputs[0]
    assert len(output.token_ids) == 4
    assert output.token_ids[-1] == END


@pytest.mark.pins("late_abort", "abort_reason")
def test_an_abort_acts_one_step_later(llm: LLM, salt: str) -> None:
    async def read() -> Any:
        result = submit(llm, salt=salt, streaming=True, max_tokens=50, logits_processor=Gate(salt))
        GATES[salt].release()
        await result.__anext__()
        while len(CALLS[salt]) < 2:  # until the loop stands in the gate of step 2
            await asyncio.sleep(0.005)
        result.abort()
        GATES[salt].release(100)
        async for _ in result:
            pass
        return result

    result = run(read())
    assert result.aborted()
    assert result.outputs[0].finish_reason == "cancelled"
    assert len(result.outputs[0].token_ids) == 3
    result.abort()  # harmless


def test_a_waiting_request_can_be_aborted_and_its_neighbours_go_on(salt: str, reference: Any) -> None:
    with build(max_batch_size=1) as llm:
        first = submit(llm, salt=salt, logits_processor=Gate(salt))
        second = submit(llm)
        second.abort()
        GATES[salt].release(100)
        assert second.result(timeout=30).outputs[0].finish_reason == "cancelled"
        assert second.outputs[0].token_ids == []
        assert first.result(timeout=30).outputs[0].token_ids == reference(PROMPT, 8)


# --- processors -----------------------------------------------------------------------------------------------------


@pytest.mark.pins("processors_pickled")
def test_processors_are_copies(llm: LLM, salt: str) -> None:
    mine = Record(salt)
    finish(llm, salt=salt, logits_processor=mine, max_tokens=3)
    finish(llm, salt=salt, logits_processor=mine, max_tokens=3)
    assert mine.count == 0
    assert [call[0] for call in CALLS[salt]] == [1, 2, 3, 1, 2, 3]


def test_processors_must_be_picklable(llm: LLM) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        submit(llm, logits_processor=lambda *_: None)


@pytest.mark.pins("five_arguments", "no_stream_no_client", "logits_shape", "history_given")
def test_processors_get_five_positional_arguments(llm: LLM, reference: Any, salt: str) -> None:
    result = finish(llm, salt=salt, logits_processor=Record(salt), max_tokens=3)
    want = reference(PROMPT, 3)
    assert len(CALLS[salt]) == 3
    for step, (_, thread, *arguments) in enumerate(CALLS[salt]):
        req_id, logits, token_ids, stream_ptr, client_id = arguments
        assert thread == "fake-tensorrt-llm"
        assert isinstance(req_id, int)
        assert req_id != result.request_id
        assert (tuple(logits.shape), logits.dtype) == ((1, 1, VOCABULARY), torch.float32)
        assert token_ids == [PROMPT + want[:step]]
        assert stream_ptr is client_id is None


@pytest.mark.pins("logits_in_place", "first_token_processed")
def test_what_a_processor_writes_counts_from_the_first_token_on(llm: LLM, salt: str) -> None:
    assert finish(llm, salt=salt, logits_processor=Force(9, 8, 7), max_tokens=3).outputs[0].token_ids == [9, 8, 7]


def test_forced_tokens_win_over_sampling(llm: LLM, salt: str) -> None:
    output = finish(llm, salt=salt, logits_processor=Force(9, 8, 7), max_tokens=3, temperature=1.5, top_p=0.5)
    assert output.outputs[0].token_ids == [9, 8, 7]


@pytest.mark.pins("processor_list")
def test_a_list_of_processors_is_applied_in_order(llm: LLM, salt: str) -> None:
    output = finish(llm, salt=salt, logits_processor=[Force(9), Force(8)], max_tokens=2).outputs[0]
    assert output.token_ids == [8, 8]


@pytest.mark.pins("five_arguments")
def test_the_number_of_a_processors_parameters_is_checked(llm: LLM) -> None:
    with pytest.raises(RequestError, match="4 or 5 positional"):
        finish(llm, logits_processor=three)


def test_four_parameters_pass_the_check(llm: LLM) -> None:
    with pytest.raises(RequestError, match="takes 4 positional arguments but 5"):
        finish(llm, logits_processor=plain)


@pytest.mark.pins("history_lags")
def test_with_overlap_the_history_lags_one_token(overlapping: LLM, reference: Any, salt: str) -> None:
    finish(overlapping, salt=salt, logits_processor=Record(salt), max_tokens=4)
    want = reference(PROMPT, 4)
    lengths = [call[4][0] for call in CALLS[salt]]
    assert lengths == [PROMPT, PROMPT, PROMPT + want[:1], PROMPT + want[:2]]


@pytest.mark.pins("surplus_step")
def test_with_overlap_one_surplus_step_follows_a_stop(overlapping: LLM, salt: str) -> None:
    output = finish(
        overlapping, salt=salt, stop_token_ids=[STOP], logits_processor=[Force(None, STOP, 7), Record(salt)]
    ).outputs[0]
    assert output.stop_reason == STOP
    assert len(output.token_ids) == 1
    assert len(CALLS[salt]) == 3


def test_with_overlap_tokens_are_the_same(llm: LLM, overlapping: LLM, reference: Any) -> None:
    for prompt in (PROMPT, [5], list(range(40))):
        assert tokens(llm, prompt) == tokens(overlapping, prompt) == reference(prompt, 8)


@pytest.mark.pins("one_failure_fails_all")
def test_a_failing_processor_fails_all_requests_of_the_step(llm: LLM, salt: str) -> None:
    first = submit(llm, salt=salt, logits_processor=Gate(salt), max_tokens=30)
    second = submit(llm, logits_processor=Fail())
    GATES[salt].release(100)
    with pytest.raises(RequestError, match="no luck"):
        second.result(timeout=30)
    with pytest.raises(RequestError, match="no luck"):
        first.result(timeout=30)
    assert finish(llm).finished


# --- reuse ----------------------------------------------------------------------------------------------------------


def resumed(llm: LLM, salt: str | None, new: Sequence[int], **first: Any) -> tuple[int, int, list[int]]:
    """Runs one visit, resumes it with new tokens; cached tokens, length of the second prompt, its tokens."""
    output = finish(llm, salt=salt, **first)
    prompt = PROMPT + output.outputs[0].token_ids + list(new)
    second = finish(llm, prompt, salt)
    return second.cached_tokens, len(prompt), second.outputs[0].token_ids


@pytest.mark.pins("reuse", "generated_stored")
@pytest.mark.parametrize("new", [[3], [3, 4, 5], list(range(20))])
def test_after_a_forced_stop_only_the_new_tokens_are_computed(
    llm: LLM, reference: Any, salt: str, new: list[int]
) -> None:
    handed_off = {"stop_token_ids": [STOP], "logits_processor": Force(None, None, None, STOP)}
    cached, length, output = resumed(llm, salt, new, **handed_off)
    assert length - cached == len(new)
    assert output == reference(PROMPT + reference(PROMPT, 3) + new, 8)


@pytest.mark.pins("last_token_not_stored")
def test_after_a_length_end_one_more_token_is_computed(llm: LLM, salt: str) -> None:
    cached, length, _ = resumed(llm, salt, [3, 4], max_tokens=5)
    assert length - cached == 3


@pytest.mark.pins("reuse_capped")
def test_at_least_one_prompt_token_is_computed(llm: LLM, salt: str) -> None:
    assert finish(llm, salt=salt).cached_tokens == 0
    assert finish(llm, salt=salt).cached_tokens == len(PROMPT) - 1


@pytest.mark.pins("partial_reuse")
def test_without_partial_reuse_only_whole_blocks_count(salt: str, reference: Any) -> None:
    prompt = list(range(BLOCK + 5))
    with build(cache={"enable_partial_reuse": False}) as llm:
        assert finish(llm, prompt, salt).cached_tokens == 0
        second = finish(llm, prompt, salt)
        assert second.cached_tokens == BLOCK
        assert second.outputs[0].token_ids == reference(prompt, 8)


def test_without_block_reuse_nothing_is_cached(salt: str) -> None:
    with build(cache={"enable_block_reuse": False}) as llm:
        assert [finish(llm, salt=salt).cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.pins("salted")
def test_other_salts_share_nothing(llm: LLM, salt: str) -> None:
    finish(llm, salt=salt)
    assert finish(llm, salt=next(tags)).cached_tokens == 0


def test_a_running_request_shares_its_full_blocks(llm: LLM, reference: Any, salt: str) -> None:
    prompt = list(range(3 * BLOCK + 2))
    first = submit(llm, prompt, salt, logits_processor=Gate(salt))
    GATES[salt].release(2)
    other = [*prompt[: 2 * BLOCK], 99, 98]
    second = submit(llm, other, salt)
    GATES[salt].release(100)
    assert second.result(timeout=30).cached_tokens in (0, 2 * BLOCK)
    assert second.outputs[0].token_ids == reference(other, 8)
    assert first.result(timeout=30).outputs[0].token_ids == reference(prompt, 8)


@pytest.mark.pins("stored_before_answer")
def test_a_request_submitted_after_the_final_response_finds_the_blocks(llm: LLM, salt: str) -> None:
    for i in range(3):
        assert finish(llm, salt=salt).cached_tokens == (len(PROMPT) - 1 if i else 0)


@pytest.mark.pins("evicts_least_recent")
def test_the_block_used_longest_ago_is_evicted(salt: str) -> None:
    prompts = [[i] * (BLOCK + 1) for i in range(3)]
    # Two blocks per request: the third request finds two of its own and has to take the first one's.
    with build(cache={"max_tokens": 5 * BLOCK}) as llm:
        for prompt in prompts:
            finish(llm, prompt, salt, max_tokens=2)
        assert finish(llm, prompts[2], salt, max_tokens=2).cached_tokens == BLOCK
        assert finish(llm, prompts[0], salt, max_tokens=2).cached_tokens < BLOCK


@pytest.mark.pins("evicts_low_priority_first")
def test_high_priority_blocks_outlive_others(salt: str) -> None:
    prompts = [[i] * (BLOCK + 1) for i in range(4)]
    whole = KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 100)
    keep = KvCacheRetentionConfig([whole], 100)
    with build(cache={"max_tokens": 6 * BLOCK}) as llm:
        finish(llm, prompts[0], salt, max_tokens=2, kv_cache_retention_config=keep)
        for prompt in prompts[1:]:
            finish(llm, prompt, salt, max_tokens=2)
        assert finish(llm, prompts[0], salt, max_tokens=2).cached_tokens == BLOCK


def test_a_priority_ends_with_its_duration(salt: str) -> None:
    prompts = [[i] * (BLOCK + 1) for i in range(4)]
    moment = datetime.timedelta(milliseconds=1)
    whole = KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 100, moment)
    with build(cache={"max_tokens": 5 * BLOCK}) as llm:
        keep = KvCacheRetentionConfig([whole], 100, moment)
        finish(llm, prompts[0], salt, max_tokens=2, kv_cache_retention_config=keep)
        time.sleep(0.01)
        for prompt in prompts[1:]:
            finish(llm, prompt, salt, max_tokens=2)
        assert finish(llm, prompts[0], salt, max_tokens=2).cached_tokens < BLOCK


def test_requests_wait_until_their_worst_case_fits(salt: str, reference: Any) -> None:
    with build(cache={"max_tokens": 3 * BLOCK}) as llm:
        results = [submit(llm, [i, i + 1], next(tags), max_tokens=20) for i in range(6)]
        for i, result in enumerate(results):
            assert result.result(timeout=30).outputs[0].token_ids == reference([i, i + 1], 20)
        assert max(rows for rows, _ in llm.get_stats()[0]["iterations"]) == 1
        with pytest.raises(RequestError, match="never fit"):
            finish(llm, max_tokens=100)


def test_all_blocks_come_back(salt: str) -> None:
    generator = torch.Generator().manual_seed(3)
    with build(cache={"max_tokens": 20 * BLOCK}) as llm:
        for _ in range(40):
            length, count = (int(x) for x in torch.randint(1, 40, (2,), generator=generator))
            prompt = torch.randint(0, 3, (length,), generator=generator).tolist()
            finish(llm, prompt, salt, max_tokens=count, logits_processor=Force(None, 1, None, 2, STOP))
        stats = llm.get_stats()[0]["kvCacheStats"]
        assert stats["freeNumBlocks"] + stats["storedNumBlocks"] == stats["maxNumBlocks"] == 20


# --- sampling gaps --------------------------------------------------------------------------------------------------


@pytest.mark.pins("ignores_penalties")
def test_penalties_are_ignored(llm: LLM, reference: Any) -> None:
    penalties = {"repetition_penalty": 9.0, "presence_penalty": 50.0, "frequency_penalty": 50.0}
    assert tokens(llm, **penalties) == reference(PROMPT, 8)


@pytest.mark.pins("ignores_bad_words")
def test_bad_words_are_ignored(llm: LLM, reference: Any) -> None:
    want = reference(PROMPT, 8)
    assert tokens(llm, bad_token_ids=want[:1]) == want


@pytest.mark.pins("ignores_min_p")
def test_min_p_is_ignored(llm: LLM) -> None:
    drawn = {tokens(llm, max_tokens=1, temperature=50.0, min_p=0.9)[0] for _ in range(12)}
    assert len(drawn) > 3


@pytest.mark.pins("ignores_seed")
def test_seeds_are_ignored(llm: LLM) -> None:
    drawn = {tuple(tokens(llm, temperature=50.0, seed=7)) for _ in range(3)}
    assert len(drawn) == 3


def test_every_ignored_parameter_is_in_the_table() -> None:
    assert set(facts.IGNORED_BY_TORCH_SAMPLER) < set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("greedy", [{}, {"top_k": 1, "temperature": 2.0}, {"top_p": 0.0}, {"temperature": 0.0}])
def test_what_means_greedy(llm: LLM, reference: Any, greedy: dict[str, Any]) -> None:
    assert tokens(llm, **greedy) == reference(PROMPT, 8)


def test_top_k_and_top_p_restrict_the_draw(llm: LLM) -> None:
    flat = {"temperature": 1e4, "max_tokens": 1}
    assert len({tokens(llm, top_k=2, **flat)[0] for _ in range(12)}) <= 2
    assert len({tokens(llm, top_p=0.01, **flat)[0] for _ in range(12)}) <= 4


# --- limits and models ----------------------------------------------------------------------------------------------


@pytest.mark.pins("prompt_limit")
def test_a_prompt_longer_than_max_num_tokens_is_refused() -> None:
    with build(max_num_tokens=BLOCK, max_batch_size=2) as llm, pytest.raises(ValueError, match="max_num_tokens"):
        submit(llm, [1] * (BLOCK + 1))


@pytest.mark.pins("chunks_processed")
def test_a_long_prompt_is_prefilled_in_chunks_with_a_call_after_each(reference: Any, salt: str) -> None:
    prompt = [i % 200 for i in range(5 * BLOCK + 3)]
    settings = {"max_num_tokens": 2 * BLOCK + 7, "max_batch_size": 2, "enable_chunked_prefill": True}
    with build(**settings) as llm:
        output = finish(llm, prompt, salt, logits_processor=Record(salt), max_tokens=2).outputs[0]
        assert output.token_ids == reference(prompt, 2)
        assert [call[4] for call in CALLS[salt]] == [[prompt]] * 3 + [[prompt + output.token_ids[:1]]]
        assert llm.get_stats()[0]["iterations"] == [(1, 32), (1, 32), (1, 19), (1, 1)]


@pytest.mark.pins("vocabulary_checked")
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(llm: LLM, token: int) -> None:
    with pytest.raises(RequestError, match="Token ID out of range"):
        finish(llm, [1, token])


def test_max_seq_len_ends_a_response(salt: str) -> None:
    with build(max_seq_len=20) as llm:
        output = finish(llm, list(range(17)), max_tokens=50).outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (3, "length")
        with pytest.raises(RequestError, match="no room"):
            finish(llm, list(range(20)))


@pytest.mark.pins("batched")
def test_ready_requests_share_a_forward_pass(llm: LLM, reference: Any, salt: str) -> None:
    gate = submit(llm, salt=salt, logits_processor=Gate(salt), max_tokens=3)
    others = [submit(llm, [i], next(tags), max_tokens=4) for i in range(5)]
    GATES[salt].release(100)
    assert gate.result(timeout=30).finished
    for i, other in enumerate(others):
        assert other.result(timeout=30).outputs[0].token_ids == reference([i], 4)
    assert max(rows for rows, _ in llm.get_stats()[0]["iterations"][-9:]) == 6


@pytest.mark.pins("model_registered", "additional_outputs")
def test_a_registered_class_replaces_the_stock_class(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, "MODEL_CLASS_MAPPING", dict(modeling_utils.MODEL_CLASS_MAPPING))
    calls = []

    @modeling_utils.register_auto_model("Qwen3ForCausalLM")
    class Routed(Qwen3ForCausalLM):
        def forward(
            self, attn_metadata: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any
        ) -> dict[str, torch.Tensor]:
            hidden = self.model(attn_metadata=attn_metadata, input_ids=input_ids, position_ids=position_ids, **kwargs)
            rows = hidden[attn_metadata.seq_lens_cuda.cumsum(0).long() - 1]
            calls.append((tuple(input_ids.shape), tuple(position_ids.shape), attn_metadata.num_contexts))
            logits = self.lm_head(rows).float()
            logits[:, STOP] = torch.where(rows[:, 0] > 1e9, 1e9, logits[:, STOP])
            return {"logits": logits, "score": rows.mean(-1)}

    with build() as llm:
        result = finish(llm, max_tokens=3, additional_model_outputs=["score"]).outputs[0]
        assert result.token_ids == reference(PROMPT, 3)
        assert result.additional_generation_outputs["score"].shape == (3,)
        assert calls == [((5,), (1, 5), 1), ((1,), (1, 1), 0), ((1,), (1, 1), 0)]
        with pytest.raises(RequestError, match="no 'other'"):
            finish(llm, additional_model_outputs=["other"])


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(SMALL / name)
    (tmp_path / "config.json").write_text((SMALL / "config.json").read_text().replace("Qwen3ForCausalLM", "NoSuch"))
    with pytest.raises(ValueError, match="NoSuch"):
        LLM(model=tmp_path, skip_tokenizer_init=True)


def test_a_class_with_parameters_beyond_the_checkpoint_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, "MODEL_CLASS_MAPPING", dict(modeling_utils.MODEL_CLASS_MAPPING))

    @modeling_utils.register_auto_model("Qwen3ForCausalLM")
    class Routed(Qwen3ForCausalLM):
        def __init__(self, model_config: Any) -> None:
            super().__init__(model_config)
            self.router = torch.nn.Linear(2, 2)

    with pytest.raises(KeyError, match="router"):
        build()


def test_logits_equal_the_torch_engine_to_the_bit(salt: str) -> None:
    cache = TorchKvCacheConfig(tokens_per_block=BLOCK, max_tokens=1024)
    engine = TorchEngine.from_folder(SMALL, TorchEngineConfig(kv_cache_config=cache, device="cpu"))
    handle = engine.open(kv_tokens=100)
    history: list[int] = []
    with build() as llm:
        for new in (PROMPT, [9, 8, 7], [1], list(range(30)), [2], [3, 4]):
            history += new
            want = engine.step([EngineRow(handle, new)]).logits[0]
            output = finish(llm, history, salt, return_generation_logits=True, max_tokens=1)
            assert output.cached_tokens == len(history) - len(new)
            assert torch.equal(output.outputs[0].generation_logits[0], want)


# --- the worker process ---------------------------------------------------------------------------------------------


def test_by_default_the_loop_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, reference: Any, salt: str
) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    with build() as llm:
        output = finish(llm, salt=salt, logits_processor=[Record(salt), Force(None, None, STOP)], stop_token_ids=[STOP])
        assert output.outputs[0].token_ids == reference(PROMPT, 2)
        assert output.outputs[0].stop_reason == STOP
        assert CALLS[salt] == []
        assert finish(llm, [*PROMPT, 1], salt).cached_tokens == len(PROMPT)
        with pytest.raises(RequestError, match="no luck"):
            finish(llm, logits_processor=Fail())
        running = submit(llm, salt=salt, max_tokens=500, streaming=True)
        running.abort()
        assert running.result(timeout=30).outputs[0].finish_reason == "cancelled"
        worker = llm._executor.worker._process
        waiting = submit(llm, salt=salt, max_tokens=900)
        worker.kill()
        with pytest.raises(RequestError, match="ended"):
            waiting.result(timeout=30)
    assert worker.wait(timeout=10)


def test_a_model_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    with pytest.raises(RuntimeError, match=re.escape(str(tmp_path))):
        LLM(model=tmp_path, skip_tokenizer_init=True, max_seq_len=10)


# --- the table and the switches -------------------------------------------------------------------------------------


def test_the_stubs_are_written_from_the_table() -> None:
    for path, content in stubs.stub_files().items():
        assert path.read_text() == content, f"{path} is old; run python -m tests.contract.stubs"
    assert set(DOUBLE.rglob("*.pyi")) == set(stubs.stub_files())


@pytest.mark.parametrize("surface", facts.SURFACES, ids=lambda surface: surface.path)
def test_the_double_has_what_the_table_lists(surface: facts.Surface) -> None:
    __import__(surface.module)
    found: Any = sys.modules[surface.module]
    for name in surface.name.split("."):
        found = getattr(found, name)
    if surface.kind in (facts.Kind.CALL, facts.Kind.CONSTRUCTOR, facts.Kind.COROUTINE):
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        if "**kwargs" not in surface.names:
            assert tuple(names) == surface.names


def test_every_behaviour_is_pinned() -> None:
    named: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for marks in re.findall(r"mark\.pins\(([^)]*)\)", path.read_text()):
            named.update(re.findall(r'"(\w+)"', marks))
    assert named == set(_behaviour.SWITCHES)


def test_switches_are_told_to_other_processes() -> None:
    code = "from tensorrt_llm import _behaviour; print(*sorted(_behaviour.broken_now()))"
    environment = {**double_environment(broken=["reuse", "salted"]), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == ["reuse", "salted"]


def test_nothing_imports_tensorrt_llm_by_itself() -> None:
    code = (
        "import pkgutil, importlib, sys, tokenrouter\n"
        "for module in pkgutil.walk_packages(tokenrouter.__path__, 'tokenrouter.'):\n"
        "    if module.name.split('.')[1] != 'triton': importlib.import_module(module.name)\n"
        "assert 'tensorrt_llm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
