"""What the double pins of requests: arguments, results, processors. Each is also broken once, see conftest."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm._torch.models import modeling_utils
from tensorrt_llm._torch.models.modeling_qwen3 import Qwen3ForCausalLM
from tensorrt_llm.executor import RequestError
from tensorrt_llm.llmapi import TorchLlmArgs

from tests.contract.calls import BLOCK, END, PROMPT, SMALL, STOP, VOCABULARY, build, finish, run, submit
from tests.contract.processors import CALLS, GATES, Fail, Force, Gate, Record, three
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch.config import KvCacheConfig as TorchKvCacheConfig
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine

# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.pins("unknown_arguments_refused")
def test_llm_refuses_unknown_arguments() -> None:
    with pytest.raises(ValueError, match="max_batchsize"):
        build(max_batchsize=3).shutdown()


def test_what_is_not_modelled_is_refused() -> None:
    for setting in ({"speculative_config": object()}, {"disable_overlap_scheduler": False}):
        with pytest.raises(NotImplementedError, match=next(iter(setting))):
            build(**setting)
    with pytest.raises(NotImplementedError, match="top_k"):
        SamplingParams(top_k=3)


@pytest.mark.pins("needs_gpu_for_arguments")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_arguments_cannot_be_constructed_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="GPU"):
        TorchLlmArgs(model=SMALL)


@pytest.mark.pins("unknown_fields_refused")
def test_sampling_params_refuse_unknown_fields() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        SamplingParams(nonsense=1)


@pytest.mark.pins("end_id_needed")
def test_without_a_tokenizer_end_id_is_needed(llm: LLM) -> None:
    with pytest.raises(ValueError, match="end_id"):
        submit(llm, end_id=None)


@pytest.mark.pins("prompt_limit")
def test_a_prompt_longer_than_max_num_tokens_is_refused() -> None:
    with build(max_num_tokens=BLOCK) as llm, pytest.raises(ValueError, match="max_num_tokens"):
        submit(llm, [1] * (BLOCK + 1))


@pytest.mark.pins("vocabulary_checked")
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(llm: LLM, token: int) -> None:
    with pytest.raises(RequestError, match="Token ID out of range"):
        finish(llm, [1, token])


def test_max_seq_len_ends_a_response() -> None:
    with build(max_seq_len=20) as llm:
        output = finish(llm, list(range(17)), max_tokens=50).outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (3, "length")
        with pytest.raises(RequestError, match="no room"):
            finish(llm, list(range(20)))


@pytest.mark.pins("model_registered")
def test_a_registered_class_replaces_the_stock_class(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, "MODEL_CLASS_MAPPING", dict(modeling_utils.MODEL_CLASS_MAPPING))
    calls = []

    @modeling_utils.register_auto_model("Qwen3ForCausalLM")
    class Routed(Qwen3ForCausalLM):
        def forward(self, attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((attn_metadata.seq_lens_cuda.tolist(), attn_metadata.num_contexts))
            return super().forward(attn_metadata, *args, **kwargs)

    with build() as llm:
        assert finish(llm, max_tokens=3).outputs[0].token_ids == reference(PROMPT, 3)
    assert calls == [([5], 1), ([1], 0), ([1], 0)]


def test_a_class_with_parameters_beyond_the_checkpoint_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, "MODEL_CLASS_MAPPING", dict(modeling_utils.MODEL_CLASS_MAPPING))

    @modeling_utils.register_auto_model("Qwen3ForCausalLM")
    class Routed(Qwen3ForCausalLM):
        def __init__(self, model_config: Any) -> None:
            super().__init__(model_config)
            self.router = torch.nn.Linear(2, 2)

    with pytest.raises(KeyError, match="router"):
        build()


def test_logits_equal_the_torch_engine_to_the_bit(llm: LLM, salt: str) -> None:
    cache = TorchKvCacheConfig(tokens_per_block=BLOCK, max_tokens=1024)
    engine = TorchEngine.from_folder(SMALL, TorchEngineConfig(kv_cache_config=cache, device="cpu"))
    handle = engine.open(kv_tokens=100)
    history: list[int] = []
    for new in (PROMPT, [9, 8, 7], [1], list(range(30)), [2], [3, 4]):
        history += new
        want = engine.step([EngineRow(handle, new)]).logits[0]
        output = finish(llm, history, salt, logits_processor=Record(salt), max_tokens=1)
        assert output.cached_tokens == len(history) - len(new)
        assert torch.equal(CALLS[salt][-1][2].flatten(), want)


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.pins("returns_at_once")
def test_generate_async_returns_before_the_first_token(llm: LLM, salt: str) -> None:
    result = submit(llm, salt=salt, logits_processor=Gate(salt, 2), max_tokens=1)
    assert not result.outputs[0].token_ids
    assert llm._executor.unanswered(result.request_id)
    GATES[salt].release(9)
    assert result.result(timeout=30).finished


@pytest.mark.pins("needs_running_loop")
def test_async_iteration_needs_a_loop_at_submission(llm: LLM) -> None:
    result = submit(llm, max_tokens=1)
    while llm._executor.unanswered(result.request_id):
        time.sleep(0.001)
    with pytest.raises(AssertionError, match="event loop"):
        run(result.__anext__())


@pytest.mark.pins("same_object", "cumulative")
def test_streaming_yields_the_same_cumulative_object(llm: LLM, reference: Any, salt: str) -> None:
    async def read() -> list[tuple[list[int], bool]]:
        result = submit(llm, salt=salt, streaming=True)
        seen = []
        async for output in result:
            assert output is result
            seen.append((list(output.outputs[0].token_ids), output.finished))
        return seen

    want = reference(PROMPT, 8)
    assert run(read()) == [(want[: i + 1], i == 7) for i in range(8)]


@pytest.mark.parametrize(("interval", "streaming", "ends"), [(1, False, [8]), (3, True, [1, 3, 6, 8])])
def test_responses_come_by_interval_and_at_the_end(interval: int, streaming: bool, ends: list[int]) -> None:
    async def read(llm: LLM) -> Any:
        return [len(output.outputs[0].token_ids) async for output in submit(llm, streaming=streaming)]

    with build(stream_interval=interval) as llm:
        assert run(read(llm)) == ends


def ended(llm: LLM, *ids: int, **changes: Any) -> tuple[list[int], str, int | None]:
    """Tokens, finish reason and stop reason of a request whose tokens are forced."""
    output = finish(llm, stop_token_ids=[STOP], logits_processor=Force(*ids), **changes).outputs[0]
    return output.token_ids, output.finish_reason, output.stop_reason


@pytest.mark.pins("stop_ids_cut")
def test_a_stop_id_ends_the_response_and_is_cut(llm: LLM) -> None:
    assert ended(llm, 7, 8, STOP) == ([7, 8], "stop", STOP)


@pytest.mark.pins("end_id_kept", "stop_reason_only_for_stop_words")
def test_the_end_id_stays_and_gives_no_stop_reason(llm: LLM) -> None:
    assert ended(llm, 7, END) == ([7, END], "stop", None)


@pytest.mark.pins("end_id_first")
def test_the_end_id_is_tested_before_the_length(llm: LLM) -> None:
    assert ended(llm, 7, END, max_tokens=2) == ([7, END], "stop", None)


@pytest.mark.pins("length_before_stop_words")
def test_the_length_is_tested_before_stop_ids(llm: LLM) -> None:
    assert ended(llm, 7, STOP, max_tokens=2) == ([7, STOP], "length", None)


def test_an_end_id_may_be_ignored(llm: LLM) -> None:
    assert ended(llm, END, max_tokens=3, ignore_eos=True) == ([END] * 3, "length", None)


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
    assert result.outputs[0].finish_reason == "cancelled"
    assert len(result.outputs[0].token_ids) == 3
    result.abort()  # harmless


@pytest.mark.pins("queued_abort_unanswered")
def test_an_abort_of_a_queued_request_has_no_answer(salt: str, reference: Any) -> None:
    with build(max_batch_size=1) as llm:
        first = submit(llm, salt=salt, logits_processor=Gate(salt))
        queued = submit(llm)
        queued.abort()
        GATES[salt].release(100)
        assert first.result(timeout=30).outputs[0].token_ids == reference(PROMPT, 8)
        assert finish(llm).finished  # the loop has dropped it by now
        assert llm._executor.unanswered(queued.request_id)


# --- processors ------------------------------------------------------------------------------------------------------


@pytest.mark.pins("in_process_not_pickled")
def test_in_one_process_the_processor_itself_is_called(llm: LLM, salt: str) -> None:
    mine = Record(salt)
    finish(llm, salt=salt, logits_processor=mine, max_tokens=3)
    assert mine.count == 3


@pytest.mark.pins("five_arguments", "no_stream_no_client", "logits_shape", "history_given")
def test_processors_get_five_positional_arguments(llm: LLM, reference: Any, salt: str) -> None:
    result = finish(llm, salt=salt, logits_processor=Record(salt), max_tokens=3)
    want = reference(PROMPT, 3)
    assert len(CALLS[salt]) == 3
    for step, (_, req_id, logits, token_ids, stream_ptr, client_id) in enumerate(CALLS[salt]):
        assert req_id != result.request_id
        assert (tuple(logits.shape), logits.dtype) == ((1, 1, VOCABULARY), torch.float32)
        assert token_ids == [PROMPT + want[:step]]
        assert stream_ptr is client_id is None


@pytest.mark.pins("five_arguments")
def test_the_number_of_a_processors_parameters_is_checked(llm: LLM) -> None:
    with pytest.raises(RequestError, match="4 or 5 arguments"):
        finish(llm, logits_processor=three)


@pytest.mark.pins("logits_in_place", "first_token_processed")
def test_what_a_processor_writes_counts_from_the_first_token_on(llm: LLM, salt: str) -> None:
    assert finish(llm, salt=salt, logits_processor=Force(9, 8, 7), max_tokens=3).outputs[0].token_ids == [9, 8, 7]


@pytest.mark.pins("one_failure_fails_all")
def test_a_failing_processor_fails_all_active_requests(salt: str) -> None:
    """Also the one that waits for room in the cache, and takes no part in the step."""
    with build(cache={"max_tokens": 4 * BLOCK}) as llm:
        first = submit(llm, salt=salt, logits_processor=Gate(salt), max_tokens=20)
        fails = submit(llm, logits_processor=Fail())
        waits = submit(llm, max_tokens=3 * BLOCK)
        GATES[salt].release(100)
        for result in (fails, first, waits):
            with pytest.raises(RequestError, match="no luck"):
                result.result(timeout=30)
        assert finish(llm).finished
