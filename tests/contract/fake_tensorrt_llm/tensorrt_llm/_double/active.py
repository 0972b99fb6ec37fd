"""A request inside the executor: its tokens, what its processors are shown, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm import _behaviour
from tensorrt_llm._double.kv import Lease
from tensorrt_llm._double.requests import GenerationRequest, Response


@dataclass(slots=True, eq=False)
class Active:
    """A request inside the executor.

    Attributes:
        internal_id: what processors get as req_id; not the client's id.
        tokens: prompt and generated tokens, without one whose iteration is not settled yet.
        in_flight: sampled tokens that are not settled yet; at most one, and only with the overlap scheduler.
        computed: tokens whose KV is computed.
        sent: generated tokens in earlier responses.
    """

    internal_id: int
    request: GenerationRequest
    lease: Lease
    handle: Any
    processors: list[Any]
    stop_words: list[list[int]]
    tokens: list[int]
    computed: int
    in_flight: list[int] = field(default_factory=list)
    sent: int = 0
    iterations: int = 0
    logprobs: list[Any] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    additional: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) :]

    @property
    def unseen(self) -> int:
        """Tokens whose KV is not computed."""
        return len(self.tokens) + len(self.in_flight) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be computed."""
        return self.computed < len(self.request.prompt_token_ids)

    @property
    def full(self) -> bool:
        """Whether the tokens in flight are the last that it may have."""
        return len(self.generated) + len(self.in_flight) >= self.request.sampling_params.max_tokens

    def process(self, row: Tensor) -> None:
        """Calls the request's processors; `row` [V] is edited in place."""
        if not self.generated and not _behaviour.true("first_token_processed"):
            return
        history = list(self.tokens)
        if not _behaviour.true("history_lags"):
            history += self.in_flight
        if not _behaviour.true("history_given"):
            history = history[len(self.request.prompt_token_ids) :]
        given = row if _behaviour.true("logits_in_place") else row.clone()
        view = given.view(1, 1, -1) if _behaviour.true("logits_shape") else given
        last = (None, None) if _behaviour.true("no_stream_no_client") else (0, self.request.id)
        for processor in self.processors:
            if _behaviour.true("five_arguments"):
                processor(self.internal_id, view, [history], *last)
            else:
                processor(self.internal_id, view, [history], last[0])

    def note(self, row: Tensor, token: int, additional: dict[str, Tensor]) -> None:
        """Keeps what the request wants to have reported."""
        params = self.request.sampling_params
        if params.logprobs:
            self.logprobs.append(_logprobs(row, token, params.logprobs))
        if params.return_generation_logits:
            self.logits.append(row.clone())
        for name in params.additional_model_outputs or ():
            if name not in additional:
                raise RuntimeError(f"the model returned no {name!r}; it returned {sorted(additional) or 'logits only'}")
            self.additional.setdefault(name, []).append(additional[name].clone())

    def finish_reason(self, token: int) -> str | None:
        """Why the request ends with `token`, the newest; None if it goes on."""
        params = self.request.sampling_params
        ended = params.end_id is not None and not params.ignore_eos and token == params.end_id
        length = len(self.generated) >= params.max_tokens
        if ended and (_behaviour.true("end_id_first") or not length):
            return "END_ID"
        if length and _behaviour.true("length_before_stop_words"):
            return "LENGTH"
        if any(self.tokens[-len(word) :] == word for word in self.stop_words):
            return "STOP_WORDS"
        return "LENGTH" if length else None

    @property
    def stopping(self) -> bool:
        """Whether the token in flight will end it."""
        return self.in_flight in self.stop_words or self.in_flight == [self.request.sampling_params.end_id]

    def response(self, reason: str | None) -> Response:
        """What is new since the last response."""
        new, number = self.generated[self.sent :], len(self.generated)
        self.sent += len(new)
        return Response(
            self.request.id,
            new,
            reason,
            cached_tokens=self.lease.reported if _behaviour.true("reuse") else 0,
            decoding_iter=self.iterations,
            logprobs=self.logprobs[:number] if self.request.sampling_params.logprobs else None,
            generation_logits=torch.stack(self.logits[:number]) if self.logits else None,
            additional=self._additional(number),
        )

    def _additional(self, number: int) -> dict[str, Tensor] | None:
        if not self.additional or not number or not _behaviour.true("additional_outputs"):
            return None
        return {name: torch.stack(rows[:number]) for name, rows in self.additional.items()}


def _logprobs(row: Tensor, token: int, count: int) -> dict[int, tuple[float, int]]:
    """The best `count` tokens and the sampled one: id -> (log-probability, rank)."""
    values = row.float().log_softmax(-1)
    ranks = {int(t): i + 1 for i, t in enumerate(values.topk(min(count, len(values))).indices)}
    if token not in ranks:
        ranks[token] = int((values > values[token]).sum()) + 1
    return {t: (float(values[t]), rank) for t, rank in ranks.items()}
