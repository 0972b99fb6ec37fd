"""Connects results with the loop."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm._double.loop import Loop
from tensorrt_llm._double.model import PagedModel
from tensorrt_llm._double.requests import GenerationRequest, Response
from tensorrt_llm.executor.result import GenerationResult


class Executor:
    """Owns the loop of one LLM."""

    def __init__(self, args: Any) -> None:
        self._ids = itertools.count(1)
        self._results: dict[int, GenerationResult] = {}
        self.loop = Loop(PagedModel.load(args), args, self._post)
        self.loop.thread.start()

    def submit(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Sends a request on its way. Pickling errors surface here."""
        item: Any = pickle.dumps(request) if _behaviour.true("processors_pickled") else request
        self._results[request.id] = result
        self.loop.inbox.put(item)

    def next_id(self) -> int:
        """A new request id."""
        return next(self._ids)

    def abort_request(self, request_id: int) -> None:
        """Asks for the end of a request; nothing happens if it is over."""
        if request_id in self._results:
            self.loop.inbox.put(request_id)

    def shutdown(self) -> None:
        """Ends the loop."""
        self.loop.inbox.put(None)
        self.loop.thread.join()

    def _post(self, responses: list[Response]) -> None:
        for response in responses:
            result = self._results.get(response.client_id)
            if result is None:
                continue
            if response.final:
                del self._results[response.client_id]
            result._put(response)
