"""Connects results with the loop, which runs in a worker process, or in a thread of this one.

As in TensorRT-LLM, one worker process is used even for a single GPU, and TLLM_WORKER_USE_SINGLE_PROCESS=1 keeps the
loop in this process.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
from dataclasses import dataclass
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm.executor.result import GenerationResult, IterationResult, Response

FETCH_S = 20.0


@dataclass(slots=True)
class GenerationRequest:
    """A request as `LLM.generate_async` submits it."""

    id: int
    prompt_token_ids: list[int]
    sampling_params: Any
    max_tokens: int
    streaming: bool
    retention: Any
    cache_salt: str | None


class Executor:
    """Owns the worker of one LLM.

    Attributes:
        iterations: their statistics, from the first submission on.
    """

    def __init__(self, args: Any) -> None:
        self._ids = itertools.count(1)
        self._results: dict[int, GenerationResult] = {}
        self._stats: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._dead = False
        self.iterations: IterationResult | None = None
        self._in_process = os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") == "1"
        self.worker: Any
        if self._in_process:
            from tensorrt_llm._double.loop import ThreadWorker

            self.worker = ThreadWorker(args, self._post)
        else:
            from tensorrt_llm._double.process import ProcessWorker

            self.worker = ProcessWorker(args, self._post)

    def submit(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Sends a request on its way. Pickling errors surface here."""
        if self._dead:
            raise RuntimeError("the worker process ended")
        as_it_is = self._in_process and _behaviour.true("in_process_not_pickled")
        item: Any = request if as_it_is else pickle.dumps(request)
        self._results[request.id] = result
        if self.iterations is None:
            self.iterations = IterationResult(self._fetch)
        self.iterations.mark_undone()
        self.worker.put(item)

    def next_id(self) -> int:
        """A new request id."""
        return next(self._ids)

    def unanswered(self, request_id: int) -> bool:
        """Whether the final response is still to come."""
        return request_id in self._results

    def abort_request(self, request_id: int) -> None:
        """Asks for the end of a request; nothing happens if it is over."""
        if request_id in self._results and not self._dead:
            self.worker.put(request_id)

    def _fetch(self) -> list[dict[str, Any]]:
        """Iterations since the last call."""
        if self._dead:
            return []
        self.worker.put("stats")
        answer: list[dict[str, Any]] = self._stats.get(timeout=FETCH_S)
        return answer

    def shutdown(self) -> None:
        """Ends the loop."""
        self.worker.close()

    def _post(self, responses: list[Response]) -> None:
        for response in responses:
            if response.stats is not None:
                self._stats.put(response.stats)
            elif result := self._results.get(response.client_id):
                if response.final:
                    del self._results[response.client_id]
                result.put(response)
        if not responses:  # the worker died
            self._dead = True
            self._stats.put([])
            if not _behaviour.true("dead_worker_silent"):
                for request_id, result in self._results.items():
                    result.put(Response(request_id, error="the worker process ended"))
