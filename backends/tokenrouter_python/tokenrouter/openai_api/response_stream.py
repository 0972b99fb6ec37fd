"""One response from Triton as pieces of text; cancelled as soon as nobody takes them any more."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenrouter.openai_api.deployment import Deployment, Target
from tokenrouter.openai_api.errors import timed_out
from tokenrouter.openai_api.requests import GenerationFields
from tokenrouter.openai_api.tokens import Piece, PieceStream
from tokenrouter.openai_api.triton import Triton
from tokenrouter.telemetry import HEADERS

_SEEDS = 2**64


@dataclass
class ResponseStream:
    """One response.

    Attributes:
        prompt: token ids of the prompt.
        completion_tokens: tokens so far, those of a stop word included.
        finish_reason: ``stop`` or ``length`` once it is over.
        totals: `routing` of the whole response once it is over, if asked for.
    """

    triton: Triton
    deployment: Deployment
    target: Target
    prompt: Sequence[int]
    fields: dict[str, Any]
    stop: Sequence[str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    completion_tokens: int = 0
    finish_reason: str = ""
    totals: dict[str, Any] = field(default_factory=dict)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """The text as it comes: pieces that depend on the tokens alone, those together that came together.

        Raises:
            ApiError: Triton or the model refused or failed, or time ran out.
        """
        stream = PieceStream(self.deployment.tokenizer, self.prompt, self.stop)
        deltas = self.triton.generate(self.target.model, self.parameters, **self.fields)
        try:
            async for delta in deltas:
                self.completion_tokens += len(delta.tokens)
                if pieces := stream.push(delta.tokens):
                    yield pieces
                if delta.finish_reason == "timeout":
                    raise timed_out()
                self.finish_reason = delta.finish_reason or self.finish_reason
                self.totals = delta.totals or self.totals
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        if pieces := stream.flush():
            yield pieces


def begin(
    request: GenerationFields,
    prompt: Sequence[int],
    *,
    triton: Triton,
    deployment: Deployment,
    max_tokens: int,
    log_probs: bool,
    headers: Mapping[str, str],
) -> ResponseStream:
    """The response to one prompt; nothing is sent before its pieces are asked for.

    Args:
        headers: of the HTTP request; those of a trace go with it.

    Raises:
        ApiError: 404, the model is not served here.
    """
    target = deployment.target(request.model)
    fields: dict[str, Any] = {
        "input_ids": list(prompt),
        "max_tokens": max_tokens,
        # OpenAI's default; our own models take no temperature for greedy.
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": request.top_p or None,
        "seed": None if request.seed is None else request.seed % _SEEDS,
        "stop_words": request.stop_words or None,
        "min_tokens": request.min_tokens or None,
        "end_id": -1 if request.ignore_eos else None,  # no token ends the response
        "presence_penalty": request.presence_penalty or None,
        "frequency_penalty": request.frequency_penalty or None,
        "return_log_probs": True if log_probs else None,
    }
    if target.model == deployment.entry:
        params = None if request.policy_params is None else json.dumps(request.policy_params)
        fields |= {"policy": target.policy or request.policy, "policy_params": params}
        fields |= {"return_routing": request.routed or None, "speculation": request.speculation}
        fields |= {"explain": request.explain or None}
    trace = {name: headers[name] for name in HEADERS if name in headers}
    return ResponseStream(triton, deployment, target, prompt, fields, request.stop_words, trace)
