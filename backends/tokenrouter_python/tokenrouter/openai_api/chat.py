"""Answers of `/v1/chat/completions`, whole and as a stream, in the types of the `openai` package."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

from tokenrouter.openai_api.completions import Chunk, usage_of
from tokenrouter.openai_api.requests import ChatCompletionRequest
from tokenrouter.openai_api.response_stream import ResponseStream
from tokenrouter.openai_api.routing import routing_of
from tokenrouter.openai_api.tokens import Piece


@dataclass
class ChatAnswer:
    """The answer to one request."""

    request: ChatCompletionRequest
    response: ResponseStream
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> ChatCompletion:
        """The answer when all of it is there."""
        pieces = [piece async for together in self.response.pieces() for piece in together]
        message = ChatCompletionMessage(role="assistant", content="".join(piece.text for piece in pieces))
        extras = {**self._extras(pieces), **self._totals(pieces)}
        values = {"index": 0, "message": message, "finish_reason": self.response.finish_reason, "logprobs": None}
        return ChatCompletion(
            id=self.id,
            choices=[Choice.model_validate({**values, **extras})],
            created=self.created,
            model=self.request.model,
            object="chat.completion",
            usage=usage_of([self.response]),
        )

    async def chunks(self) -> AsyncIterator[list[Chunk]]:
        """The answer as it comes: the role, the text, the reason, and the usage if asked for."""
        envelope = self._envelope()
        role = [_chunk(envelope, {"role": "assistant", "content": ""})]
        async for pieces in self.response.pieces():
            yield role + [_chunk(envelope, {"content": piece.text}, **self._extras([piece])) for piece in pieces]
            role = []
        yield [*role, _chunk(envelope, {}, self.response.finish_reason, **self._totals())]
        if self.request.include_usage:
            yield [{**envelope, "usage": usage_of([self.response]).model_dump()}]

    def _extras(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.request.logprobs:
            extras["logprobs"] = ChoiceLogprobs(content=self._log_probs(pieces)).model_dump()
        if self.request.routed:
            extras["routing"] = routing_of(pieces)
        return extras

    def _totals(self, pieces: Sequence[Piece] = ()) -> dict[str, Any]:
        if not self.request.routed:
            return {}
        return {"routing": {**routing_of(pieces), **self.response.totals}}

    def _log_probs(self, pieces: Sequence[Piece]) -> list[ChatCompletionTokenLogprob]:
        tokenizer = self.response.deployment.tokenizer
        entries = []
        for token in (token for piece in pieces for token in piece.tokens):
            text = tokenizer.decode([token.id], skip_special_tokens=False)
            entries.append(
                ChatCompletionTokenLogprob(
                    token=text, bytes=list(text.encode()), logprob=token.log_prob or 0.0, top_logprobs=[]
                )
            )
        return entries

    def _envelope(self) -> Chunk:
        chunk = ChatCompletionChunk(
            id=self.id, choices=[], created=self.created, model=self.request.model, object="chat.completion.chunk"
        )
        return chunk.model_dump(exclude_unset=True)


def _chunk(envelope: Chunk, delta: dict[str, Any], reason: str | None = None, **extras: Any) -> Chunk:
    return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None, **extras}]}
