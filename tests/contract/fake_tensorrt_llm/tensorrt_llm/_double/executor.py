"""Connects results with the loop, which runs in a worker process, or in a thread of this one.

As in TensorRT-LLM, one worker process is used even for a single GPU, and TLLM_WORKER_USE_SINGLE_PROCESS=1 (or
gather_generation_logits) keeps the loop in this process. Requests are pickled in both cases.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
from typing import Any, Protocol

from tensorrt_llm import _behaviour
from tensorrt_llm._double.requests import GenerationRequest, Response
from tensorrt_llm.executor.result import GenerationResult


class Worker(Protocol):
    """Where the loop runs. It takes pickled requests, ids to abort, `Stats`, and None for the end."""

    def put(self, item: Any) -> None: ...

    def close(self) -> None: ...


class Executor:
    """Owns the worker of one LLM."""

    def __init__(self, args: Any) -> None:
        self._ids = itertools.count(1)
        self._results: dict[int, GenerationResult] = {}
        self._stats: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.worker: Worker
        if os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") == "1" or args.gather_generation_logits:
            from tensorrt_llm._double.loop import ThreadWorker

            self.worker = ThreadWorker(args, self._post)
        else:
            from tensorrt_llm._double.process import ProcessWorker

            self.worker = ProcessWorker(args, self._post)

    def submit(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Sends a request on its way. Pickling errors surface here."""
        item: Any = pickle.dumps(request) if _behaviour.true("processors_pickled") else request
        self._results[request.id] = result
        self.worker.put(item)

    def next_id(self) -> int:
        """A new request id."""
        return next(self._ids)

    def unanswered(self, request_id: int) -> bool:
        """Whether the final response is still to come."""
        return request_id in self._results

    def abort_request(self, request_id: int) -> None:
        """Asks for the end of a request; nothing happens if it is over."""
        if request_id in self._results:
            self.worker.put(request_id)

    def stats(self, timeout: float | None) -> dict[str, Any]:
        """What the loop says of its blocks and iterations."""
        self.worker.put("stats")
        answer: dict[str, Any] = self._stats.get(timeout=timeout)
        return answer

    def shutdown(self) -> None:
        """Ends the loop."""
        self.worker.close()

    def _post(self, responses: list[Response]) -> None:
        for response in responses:
            if response.stats is not None:
                self._stats.put(response.stats)
                continue
            result = self._results.get(response.client_id)
            if result is None:
                continue
            if response.final:
                del self._results[response.client_id]
            result._put(response)
        if not responses:  # the worker died
            for request_id, result in list(self._results.items()):
                result._put(Response(request_id, error="the worker process ended"))
            self._results.clear()
