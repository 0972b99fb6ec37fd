"""Answers of `/v1/chat/completions`, whole and as a stream, in the types of the `openai` package."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

from tokenrouter.openai_api.completions import usage_of
from tokenrouter.openai_api.events import Chunk, TextEvents, chunk, event
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
    _begun: bool = field(default=False, init=False)

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

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes: the role, and the text; those events together that came together."""
        of = self._event_of()
        async for pieces in self.response.pieces():
            yield self._beginning() + b"".join([of(piece) for piece in pieces])

    def ending(self) -> bytes:
        """The reason to finish, and the usage if asked for."""
        ending = self._beginning() + event(self._chunk(_choice({}, self.response.finish_reason, **self._totals())))
        if self.request.include_usage:
            ending += event({**self._chunk(), "usage": usage_of([self.response]).model_dump()})
        return ending

    def _beginning(self) -> bytes:
        """The role, the first time."""
        begun, self._begun = self._begun, True
        return b"" if begun else event(self._chunk(_choice({"role": "assistant", "content": ""})))

    def _event_of(self) -> Callable[[Piece], bytes]:
        """What writes a piece of the text."""
        if self.request.logprobs or self.request.routed:
            return lambda piece: event(self._chunk(_choice({"content": piece.text}, **self._extras([piece]))))
        texts = TextEvents(self._chunk(_choice({"content": ""})), "content")
        return lambda piece: texts.of(piece.text)

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

    def _chunk(self, *choices: Chunk) -> Chunk:
        return chunk("chat.completion.chunk", self.id, self.created, self.request.model, choices)


def _choice(delta: dict[str, Any], reason: str | None = None, **extras: Any) -> Chunk:
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None, **extras}
