"""Results of requests, filled as responses are taken from their queue."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm._double.requests import GenerationRequest, Response
from tensorrt_llm.executor.utils import RequestError

_REASONS = {"END_ID": "stop", "STOP_WORDS": "stop", "LENGTH": "length", "CANCELLED": "cancelled"}


@dataclass(slots=True)
class Logprob:
    """Log-probability and rank of a token."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """What has been generated so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] | None = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        """Text since the last response."""
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens since the last response."""
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        """Log-probabilities since the last response."""
        return self.logprobs[self._last_logprobs_len :]


class GenerationResult:
    """The result of one request: iterate over it, or await `aresult()`, or call `result()`."""

    def __init__(self, request: GenerationRequest, executor: Any, tokenizer: Any) -> None:
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.prompt: str | None = None
        self.context_logits = None
        self._request = request
        self._executor = executor
        self._tokenizer = tokenizer
        self._stop_words = request.sampling_params.stop_words()
        self._done = False
        self._aborted = False
        self._outputs = [CompletionOutput(0)]
        self._queue: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aqueue: asyncio.Queue[Response] | None = None
        try:
            self._loop = asyncio.get_running_loop()
            self._aqueue = asyncio.Queue()
        except RuntimeError:
            if not _behaviour.true("needs_running_loop"):
                self._aqueue = asyncio.Queue()

    @property
    def request_id(self) -> int:
        """The client's id of this request."""
        return self._request.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self._request.prompt_token_ids

    @property
    def outputs(self) -> list[CompletionOutput]:
        """One per sequence."""
        return self._outputs

    @property
    def finished(self) -> bool:
        """Whether the final response has been taken."""
        return self._done

    def abort(self) -> None:
        """Asks for the end of this request."""
        self._executor.abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        """Whether abort() was called."""
        return self._aborted

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for the end."""
        while not self._done:
            self._handle(self._queue.get(timeout=timeout))
        return self

    async def aresult(self) -> GenerationResult:
        """Waits for the end."""
        while not self._done:
            await self._astep()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __iter__(self) -> GenerationResult:
        return self

    def __next__(self) -> GenerationResult:
        if self._done:
            raise StopIteration
        self._handle(self._queue.get())
        return self

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        await self._astep()
        return self if _behaviour.true("same_object") else copy.copy(self)

    async def _astep(self) -> None:
        assert self._aqueue is not None, "no event loop was running when the request was submitted: no async iteration"
        self._handle(await self._aqueue.get())

    def _put(self, response: Response) -> None:
        """Called in the executor's thread."""
        self._queue.put(response)
        if self._aqueue is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
            (self._loop.call_soon_threadsafe if self._loop else _now)(self._aqueue.put_nowait, response)

    def _handle(self, response: Response) -> None:
        self._done = response.final
        if response.error is not None:
            raise RequestError(response.error)
        self.decoding_iter = response.decoding_iter
        self.cached_tokens = response.cached_tokens
        self.avg_decoded_tokens_per_iter = 1.0
        output = self._outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        if _behaviour.true("cumulative"):
            output.token_ids.extend(response.token_ids)
        else:
            output.token_ids, output._last_token_ids_len = list(response.token_ids), 0
        if response.logprobs is not None:
            output._last_logprobs_len = len(output.logprobs)
            output.logprobs += [_dress(entry) for entry in response.logprobs[len(output.logprobs) :]]
            best = zip(output.logprobs, output.token_ids, strict=False)
            output.cumulative_logprob = sum(entry[token].logprob for entry, token in best)
        output.generation_logits = response.generation_logits
        output.additional_generation_outputs = response.additional
        if response.finish_reason is not None:
            self._finish(output, response.finish_reason)
        self._detokenize(output)

    def _finish(self, output: CompletionOutput, reason: str) -> None:
        output.finish_reason = _REASONS[reason]
        params = self._request.sampling_params
        if reason == "CANCELLED" and not _behaviour.true("abort_reason"):
            output.finish_reason = None
        if reason == "END_ID":
            if not _behaviour.true("end_id_kept"):
                output.token_ids = output.token_ids[:-1]
            if not _behaviour.true("stop_reason_only_for_stop_words"):
                output.stop_reason = params.end_id
        if reason != "STOP_WORDS":
            return
        for stop_reason, word in self._stop_words:
            if output.token_ids[-len(word) :] == word:
                output.stop_reason = stop_reason
                if not params.include_stop_str_in_output and _behaviour.true("stop_ids_cut"):
                    output.token_ids = output.token_ids[: -len(word)]
                return

    def _detokenize(self, output: CompletionOutput) -> None:
        params = self._request.sampling_params
        if self._tokenizer is not None and params.detokenize:
            output._last_text_len = len(output.text)
            output.text = self._tokenizer.decode(output.token_ids, skip_special_tokens=params.skip_special_tokens)


def _dress(entry: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
    return {token: Logprob(*values) for token, values in entry.items()}


def _now(function: Any, *args: Any) -> None:
    function(*args)
