"""What travels between `LLM` and the executor's loop. Everything here is pickled on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class GenerationRequest:
    """A request as `LLM.generate_async` submits it."""

    id: int
    prompt_token_ids: list[int]
    sampling_params: Any
    streaming: bool
    retention: Any = None
    cache_salt: str | None = None


@dataclass(slots=True)
class Response:
    """News about one request.

    Attributes:
        client_id: the request's id at the client.
        token_ids: tokens since the last response.
        finish_reason: END_ID, STOP_WORDS, LENGTH, CANCELLED, or None while it goes on.
        error: why it failed; then it is over.
        cached_tokens: prompt tokens that were not computed.
        decoding_iter: iterations in which it took part.
        logprobs: of all tokens so far.
        generation_logits: [tokens so far, V].
        additional: name to [tokens so far, ...].
        stats: set in the answer to a question about the loop, which concerns no request.
    """

    client_id: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    decoding_iter: int = 0
    logprobs: Any = None
    generation_logits: Any = None
    additional: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None
