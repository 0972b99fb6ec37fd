"""Answers of `/v1/completions`, whole and as a stream, in the types of the `openai` package."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.completion_choice import Logprobs

from tokenrouter.openai_api.events import Chunk, TextEvents, chunk, event
from tokenrouter.openai_api.requests import CompletionRequest
from tokenrouter.openai_api.response_stream import ResponseStream
from tokenrouter.openai_api.routing import routing_of
from tokenrouter.openai_api.tokens import Piece


@dataclass
class Answer:
    """The answer to one request, over all of its prompts."""

    request: CompletionRequest
    responses: Sequence[ResponseStream]
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> Completion:
        """The answer when all of it is there."""
        tasks = [asyncio.ensure_future(self._collect(index)) for index in range(len(self.responses))]
        try:
            choices = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return Completion(
            id=self.id,
            choices=list(choices),
            created=self.created,
            model=self.request.model,
            object="text_completion",
            usage=self._usage(),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes, prompt after prompt, but for its ending; those events together that came together."""
        for index, response in enumerate(self.responses):
            if index:
                yield event(self._last(index - 1))
            if echo := self._echo(response):
                yield event(self._chunk(_choice(index, echo)))
            of = self._event_of(index, len(echo))
            async for pieces in response.pieces():
                yield b"".join([of(piece) for piece in pieces])

    def ending(self) -> bytes:
        """The last choice's reason to finish, and the usage if asked for."""
        ending = event(self._last(len(self.responses) - 1))
        if self.request.include_usage:
            ending += event({**self._chunk(), "usage": self._usage().model_dump()})
        return ending

    async def _collect(self, index: int) -> CompletionChoice:
        response = self.responses[index]
        pieces = [piece async for together in response.pieces() for piece in together]
        echo = self._echo(response)
        text = echo + "".join(piece.text for piece in pieces)
        extras = {**self._extras(pieces, len(echo)), **self._totals(response, pieces)}
        return CompletionChoice.model_validate(_choice(index, text, response.finish_reason, **extras))

    def _event_of(self, index: int, offset: int) -> Callable[[Piece], bytes]:
        """What writes a piece of this choice's text, which begins at an offset."""
        if self.request.logprobs is None and not self.request.routed:
            texts = TextEvents(self._chunk(_choice(index, "")), "text")
            return lambda piece: texts.of(piece.text)

        def with_extras(piece: Piece) -> bytes:
            nonlocal offset
            found = event(self._chunk(_choice(index, piece.text, **self._extras([piece], offset))))
            offset += len(piece.text)
            return found

        return with_extras

    def _last(self, index: int) -> Chunk:
        """The last chunk of a choice: why it ended."""
        response = self.responses[index]
        return self._chunk(_choice(index, "", response.finish_reason, **self._totals(response)))

    def _echo(self, response: ResponseStream) -> str:
        if not self.request.echo:
            return ""
        return str(response.deployment.tokenizer.decode(list(response.prompt), skip_special_tokens=True))

    def _extras(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.request.logprobs is not None:
            extras["logprobs"] = self._log_probs(pieces, offset).model_dump()
        if self.request.routed:
            extras["routing"] = routing_of(pieces)
        return extras

    def _totals(self, response: ResponseStream, pieces: Sequence[Piece] = ()) -> dict[str, Any]:
        if not self.request.routed:
            return {}
        return {"routing": {**routing_of(pieces), **response.totals}}

    def _log_probs(self, pieces: Sequence[Piece], offset: int) -> Logprobs:
        tokenizer = self.responses[0].deployment.tokenizer
        texts, values, offsets = [], [], []
        for piece in pieces:
            for token in piece.tokens:
                texts.append(tokenizer.decode([token.id], skip_special_tokens=False))
                values.append(token.log_prob or 0.0)
                offsets.append(offset)
            offset += len(piece.text)
        top = [{text: value} for text, value in zip(texts, values, strict=True)] if self.request.logprobs else None
        return Logprobs(tokens=texts, token_logprobs=values, text_offset=offsets, top_logprobs=top)

    def _usage(self) -> CompletionUsage:
        return usage_of(self.responses)

    def _chunk(self, *choices: Chunk) -> Chunk:
        return {**chunk("text_completion", self.id, self.created, self.request.model, choices), "usage": None}


def usage_of(responses: Sequence[ResponseStream]) -> CompletionUsage:
    """Tokens of prompts and responses."""
    prompt = sum(len(response.prompt) for response in responses)
    completion = sum(response.completion_tokens for response in responses)
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _choice(index: int, text: str, reason: str | None = None, **extras: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None, **extras}
