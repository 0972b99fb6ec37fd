"""What the double pins of the reuse of KV blocks. Each behaviour is also broken once, see conftest.py."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensorrt_llm import LLM
from tensorrt_llm.executor import RequestError
from tensorrt_llm.llmapi import KvCacheRetentionConfig

from tests.contract.calls import (
    BLOCK,
    PROMPT,
    STOP,
    build,
    finish,
    submit,
    tags,
)
from tests.contract.processors import GATES, Force, Gate


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
