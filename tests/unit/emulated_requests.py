"""Requests to emulated engines, which repeat the prompt, and their right answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tests.support.repositories import END_ID, byte_tokenizer
from tokenrouter.messages import PolicySpec, Sampling
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Result

MS = 1_000_000
TOKENIZER = byte_tokenizer()
PROMPT = [10, 20, 30, 40, 50, 60]


def spec(name: str, **params: Any) -> PolicySpec:
    """A policy and its parameters."""
    return PolicySpec(name, msgspec.json.encode(params).decode())


def request(
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    policy: PolicySpec | None = None,
    stop_words: tuple[str, ...] = (),
    stream: bool = False,
    timeout_ns: int | None = None,
    priority: int = 0,
    speculation: bool | None = None,
    **sampling: Any,
) -> GenerationRequest:
    """A request; by default greedy and ended by the end token."""
    sampling.setdefault("end_ids", (END_ID,))
    return GenerationRequest(
        prompt=TOKENIZER.decode(list(prompt)),
        tokens=list(prompt),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        stop_words=stop_words,
        policy=policy or spec("scripted", writers=[0, 1]),
        stream=stream,
        timeout_ns=timeout_ns,
        priority=priority,
        speculation=speculation,
    )


def expected_tokens(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the emulated engine answers, whoever writes: the prompt and the end token, cut to `max_tokens`."""
    return [*prompt, END_ID][:max_tokens]


def writers(result: Result) -> list[str]:
    """Who wrote each token."""
    return [run.model for run in result.runs for _ in range(run.start, run.end)]
