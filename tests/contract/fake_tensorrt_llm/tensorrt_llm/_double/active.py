"""A request inside the executor: its tokens, what its processors are shown, and how it ends."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tensorrt_llm import _behaviour
from tensorrt_llm._double.kv import Lease
from tensorrt_llm.executor.result import Response


@dataclass(slots=True, eq=False)
class Active:
    """A request inside the executor.

    Attributes:
        internal_id: what processors get as req_id; not the client's id.
        tokens: prompt and generated tokens.
        chunk: tokens of it that the next iteration takes in.
        lease: KV blocks, from the first iteration on, when the prefix is looked up.
        computed: tokens whose KV is computed.
        sent: generated tokens in earlier responses.
        reason: why it ends, once it does.
        scheduled: when its first step began.
        first: iteration of its first token, and when that came.
    """

    internal_id: int
    request: Any
    processors: list[Any]
    tokens: list[int]
    chunk: int = 0
    lease: Lease | None = None
    handle: Any = None
    computed: int = 0
    sent: int = 0
    reason: str | None = None
    scheduled: float | None = None
    first: tuple[int, float] | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be computed."""
        return self.computed < self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that are charged for it: all whose KV is not known to be computed."""
        return len(self.tokens) - self.computed

    def process(self, row: Tensor) -> None:
        """Calls the request's processors; `row` [V] is edited in place."""
        if not self.generated and not _behaviour.true("first_token_processed"):
            return
        history = list(self.tokens) if _behaviour.true("history_given") else self.generated
        given = row if _behaviour.true("logits_in_place") else row.clone()
        view = given.view(1, 1, -1) if _behaviour.true("logits_shape") else given
        last = (None, None) if _behaviour.true("no_stream_no_client") else (0, self.request.id)
        for processor in self.processors:
            processor(self.internal_id, view, [history], *last[: 2 if _behaviour.true("five_arguments") else 1])

    def append(self, token: int) -> None:
        """Adds a sampled token and says whether the request ends with it."""
        self.tokens.append(token)
        params = self.request.sampling_params
        ended = not params.ignore_eos and token == params.end_id
        full = len(self.generated) >= self.request.max_tokens
        stopped = token in (params.stop_token_ids or ())
        tests = [("END_ID", ended), ("LENGTH", full), ("STOP_WORDS", stopped)]
        if not _behaviour.true("end_id_first"):
            tests = [tests[1], tests[0], tests[2]]
        if not _behaviour.true("length_before_stop_words"):
            tests = [tests[0], tests[2], tests[1]]
        self.reason = next((name for name, applies in tests if applies), None)

    def response(self) -> Response:
        """What is new since the last response."""
        new = self.generated[self.sent :]
        self.sent += len(new)
        cached = 0 if self.lease is None or not _behaviour.true("reuse") else self.lease.reported
        return Response(self.request.id, new, self.reason, cached_tokens=cached, metrics=self._metrics())

    def _metrics(self) -> Any:
        """As `RequestPerfMetrics`, with its last response."""
        asked = self.request.sampling_params.return_perf_metrics and _behaviour.true("requests_timed")
        if not asked or self.reason is None or self.first is None or self.scheduled is None:
            return None
        iteration, came = self.first
        times = (timedelta(seconds=self.scheduled), timedelta(seconds=came))
        return SimpleNamespace(
            first_iter=iteration,
            timing_metrics=SimpleNamespace(first_scheduled_time=times[0], first_token_time=times[1]),
        )


def check_processor(processor: Any) -> None:
    """Refuses a processor that takes neither four nor five arguments."""
    number = len(inspect.signature(processor).parameters)
    if number not in (4, 5) and _behaviour.true("five_arguments"):
        raise ValueError(f"a logits processor takes 4 or 5 arguments, not {number}")
