"""What is refused by name, and how prompts are read."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from tokenrouter.entry_queue import EXPIRED, QUEUE_FULL
from tokenrouter.openai_api.errors import ApiError, from_triton
from tokenrouter.openai_api.requests import ChatCompletionRequest, CompletionRequest
from tokenrouter.openai_api.triton import _failure

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize(
    ("request_type", "base", "field", "value"),
    [
        (CompletionRequest, TEXT, "n", 2),
        (CompletionRequest, TEXT, "best_of", 2),
        (CompletionRequest, TEXT, "suffix", "x"),
        (CompletionRequest, TEXT, "logprobs", 2),
        (CompletionRequest, TEXT, "logit_bias", {"1": 5}),
        (CompletionRequest, TEXT, "prompt", ""),
        (CompletionRequest, TEXT, "prompt", ["a", ""]),
        (CompletionRequest, TEXT, "prompt", []),
        (CompletionRequest, TEXT, "prompt", ["a"] * 129),
        (CompletionRequest, TEXT, "stream_options", {"include_usage": True}),
        (ChatCompletionRequest, CHAT, "n", 2),
        (ChatCompletionRequest, CHAT, "tools", [{"type": "function"}]),
        (ChatCompletionRequest, CHAT, "functions", [{}]),
        (ChatCompletionRequest, CHAT, "response_format", {"type": "json_object"}),
        (ChatCompletionRequest, CHAT, "top_logprobs", 0),
        (ChatCompletionRequest, CHAT, "top_logprobs", 1),
        (ChatCompletionRequest, {**CHAT, "logprobs": True}, "top_logprobs", 1),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    request_type: Any, base: dict[str, Any], field: str, value: Any
) -> None:
    request = request_type(**{**base, field: value})
    with pytest.raises(ApiError) as raised:
        request.refuse_unsupported()
    assert raised.value.status == 400
    assert raised.value.body.error.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("presence_penalty", -2.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("ignore_eos", 123),
    ],
)
def test_values_out_of_range_are_invalid(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        CompletionRequest(**{**TEXT, field: value})  # type: ignore[arg-type]


def test_forms_of_prompts() -> None:
    assert CompletionRequest(model="m", prompt="a").prompts == ["a"]
    assert CompletionRequest(model="m", prompt=["a", "b"]).prompts == ["a", "b"]
    assert CompletionRequest(model="m", prompt=[1, 2]).prompts == [[1, 2]]
    assert CompletionRequest(model="m", prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (grpc.StatusCode.UNAVAILABLE, f"{QUEUE_FULL}: 4 requests wait already", 429),
        (grpc.StatusCode.UNAVAILABLE, f"{EXPIRED}: waited 1.00 s in the queue", 504),
        (grpc.StatusCode.UNAVAILABLE, "model 'large' is not connected", 503),
        (grpc.StatusCode.INVALID_ARGUMENT, "top_k is -1", 400),
        (grpc.StatusCode.NOT_FOUND, "unknown model", 404),
        (grpc.StatusCode.INTERNAL, "policy failed", 500),
    ],
)
def test_status_of_what_triton_says(code: grpc.StatusCode, text: str, status: int) -> None:
    error = from_triton(code, text)
    assert (error.status, error.body.error.message) == (status, text)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("[INVALID_ARG] max_tokens is 0;\nsend more", 400, "max_tokens is 0;\nsend more"),
        ("[UNAVAILABLE] the server is stopping", 503, "the server is stopping"),
        ("[INTERNAL] a bug", 500, "a bug"),
        ("Request for unknown model: 'a' has no available versions", 503, None),
        ("Request for unknown model: 'a' is not found", 404, None),
        ("Stub process 'a' is not healthy.", 500, None),
    ],
)
def test_an_error_out_of_a_stream_has_the_status_of_its_code(text: str, status: int, message: str | None) -> None:
    error = _failure(text)
    assert (error.status, error.body.error.message) == (status, message or text)
