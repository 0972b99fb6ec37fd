"""What the double pins of results and of how a response ends; each is also broken once, see conftest.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
from tensorrt_llm import LLM

from tests.contract.calls import (
    END,
    PROMPT,
    STOP,
    VOCABULARY,
    build,
    finish,
    run,
    submit,
)
from tests.contract.processors import CALLS, GATES, Force, Gate


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
