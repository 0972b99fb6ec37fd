"""Results of requests, filled as responses are taken from their queue."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm.executor.utils import RequestError

_REASONS = {"END_ID": "stop", "STOP_WORDS": "stop", "LENGTH": "length", "CANCELLED": "cancelled"}


@dataclass(slots=True)
class Response:
    """News about one request.

    Attributes:
        client_id: the request's id at the client.
        token_ids: tokens since the last response.
        finish_reason: END_ID, STOP_WORDS, LENGTH, CANCELLED, or None while it goes on.
        error: why it failed; then it is over.
        cached_tokens: prompt tokens that were not computed.
        metrics: of a request that is over, if it asked for them.
        stats: set in the answer to a question about the loop, which concerns no request.
    """

    client_id: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    metrics: Any = None
    stats: list[dict[str, Any]] | None = None

    @property
    def final(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class CompletionOutput:
    """What has been generated so far."""

    __slots__ = ("finish_reason", "request_perf_metrics", "stop_reason", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.request_perf_metrics: Any = None


class GenerationResult:
    """The result of one request: iterate over it, or call `result()`."""

    def __init__(self, request: Any, executor: Any) -> None:
        self.request_id: int = request.id
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self._params = request.sampling_params
        self._executor = executor
        self._queue: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aqueue: asyncio.Queue[Response] | None = None
        try:
            self._loop = asyncio.get_running_loop()
            self._aqueue = asyncio.Queue()
        except RuntimeError:
            if not _behaviour.true("needs_running_loop"):
                self._aqueue = asyncio.Queue()

    def abort(self) -> None:
        """Asks for the end of this request."""
        self._executor.abort_request(self.request_id)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for the end."""
        while not self.finished:
            self._handle(self._queue.get(timeout=timeout))
        return self

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self.finished:
            raise StopAsyncIteration
        assert self._aqueue is not None, "no event loop was running when the request was submitted: no async iteration"
        self._handle(await self._aqueue.get())
        return self if _behaviour.true("same_object") else copy.copy(self)

    def put(self, response: Response) -> None:
        """Called in the executor's thread."""
        self._queue.put(response)
        if self._aqueue is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
                (self._loop.call_soon_threadsafe if self._loop else _now)(self._aqueue.put_nowait, response)

    def _handle(self, response: Response) -> None:
        self.finished = response.final
        if response.error is not None:
            raise RequestError(response.error)
        self.cached_tokens = response.cached_tokens
        output = self.outputs[0]
        output.request_perf_metrics = response.metrics
        before = output.token_ids if _behaviour.true("cumulative") else []
        output.token_ids = [*before, *response.token_ids]
        if response.finish_reason is not None:
            self._finish(output, response.finish_reason)

    def _finish(self, output: CompletionOutput, reason: str) -> None:
        output.finish_reason = _REASONS[reason]
        if reason == "CANCELLED" and not _behaviour.true("abort_reason"):
            output.finish_reason = None
        if reason == "END_ID":
            if not _behaviour.true("end_id_kept"):
                output.token_ids = output.token_ids[:-1]
            if not _behaviour.true("stop_reason_only_for_stop_words"):
                output.stop_reason = self._params.end_id
        if reason == "STOP_WORDS":
            output.stop_reason = output.token_ids[-1]
            if _behaviour.true("stop_ids_cut"):
                output.token_ids = output.token_ids[:-1]


class IterationResult:
    """Statistics of iterations, to iterate over; begun at the first submission."""

    def __init__(self, fetch: Callable[[], list[dict[str, Any]]]) -> None:
        self._fetch = fetch
        self._records: deque[dict[str, Any]] = deque()
        self._timeout = 2.0
        self._done = False
        try:
            self.in_loop = asyncio.get_running_loop() is not None
        except RuntimeError:
            self.in_loop = False

    def mark_undone(self) -> None:
        """Called with every submission."""
        self._done = False

    def of(self, timeout: float) -> IterationResult:
        """This, with the longest wait for one."""
        self._timeout = timeout
        return self

    def results(self) -> list[dict[str, Any]]:
        """Those that there are, for callers without a loop."""
        if self.in_loop and _behaviour.true("iterations_of_a_loop"):
            raise TypeError("the JSON object must be str, bytes or bytearray, not NoneType")
        return self._fetch()

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        ended = self._done and _behaviour.true("iterations_end")
        deadline = time.monotonic() + self._timeout
        while not ended and not self._records:
            self._records.extend(await asyncio.to_thread(self._fetch))
            ended = not self._records and time.monotonic() > deadline
            await asyncio.sleep(0.01)
        if ended:
            self._done = True
            raise StopAsyncIteration
        return self._records.popleft()


def _now(function: Any, *args: Any) -> None:
    function(*args)
