"""What the double pins of logits processors and of the default sampler; each is also broken once, see conftest.py."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor import RequestError

from tests.contract.calls import (
    PROMPT,
    STOP,
    VOCABULARY,
    finish,
    submit,
    tokens,
)
from tests.contract.processors import CALLS, GATES, Fail, Force, Gate, Record, plain, three
from tokenrouter.engines.tensorrt_llm import facts


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
