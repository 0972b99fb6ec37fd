"""Times of the engine's own steps: the library's statistics of its iterations, or of requests where those mislead.

An iteration's latency begins before the loop waits for requests, so it is a step's time only if somebody was active
before (`iteration_includes_wait` in `behaviours`). Where all are new, a request whose first token came in that
iteration tells the time: from when it was first scheduled until then. A step that nobody tells so is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tokenrouter.engines.base import EngineStep

T = TypeVar("T")

PATIENCE_S = 0.05
"""Shorter than the time between two deliveries (0.1 to 0.2 s), so that asking ends while requests are running."""

MOST_PENDING = 1024
"""Iterations and times that wait for each other; the oldest is dropped."""


class Iterations:
    """Makes steps of what is told, in whatever order it comes."""

    def __init__(self) -> None:
        self._untimed: dict[int, EngineStep] = {}
        self._times: dict[int, float] = {}

    def told(self, record: Mapping[str, Any]) -> EngineStep | None:
        """The step of an iteration's statistics; None if it ran none, or if its time is not known (yet).

        Args:
            record: as `LLM.get_stats` gives it.
        """
        batching = record["inflightBatchingStats"]
        contexts = int(batching["numContextRequests"])
        batch = contexts + int(batching["numGenRequests"])
        active = int(record["numActiveRequests"])
        if not 0 < batch <= active:  # it repeats the numbers of an earlier one
            return None
        extended = max(0, int(batching["numCtxTokens"]) - contexts)
        step = EngineStep(batch, extended, float(record["iterLatencyMS"]) * 1e-3)
        if int(record["numNewActiveRequests"]) < active:
            return step
        return self._matched(int(record["iter"]), step, None)

    def timed(self, output: Any) -> EngineStep | None:
        """The step in which a request's first token came, if it is known and waits for its time.

        Args:
            output: the request's final `CompletionOutput`.
        """
        first = first_step(output)
        return None if first is None else self._matched(first[0], None, first[1])

    def _matched(self, iteration: int, step: EngineStep | None, seconds: float | None) -> EngineStep | None:
        step = step or self._untimed.pop(iteration, None)
        seconds = self._times.pop(iteration, None) if seconds is None else seconds
        if step is None and seconds is not None:
            _keep(self._times, iteration, seconds)
        elif step is not None and seconds is None:
            _keep(self._untimed, iteration, step)
        # More than the whole iteration: the prompt took several.
        if step is None or seconds is None or not 0 < seconds <= step.seconds:
            return None
        return replace(step, seconds=seconds)


def first_step(output: Any) -> tuple[int, float] | None:
    """Iteration of a request's first token, and seconds from its first scheduling until then; None if it does not tell.

    Args:
        output: the request's final `CompletionOutput`.
    """
    metrics = getattr(output, "request_perf_metrics", None)
    iteration = getattr(metrics, "first_iter", None)
    if metrics is None or iteration is None:
        return None
    times = metrics.timing_metrics
    return int(iteration), (times.first_token_time - times.first_scheduled_time).total_seconds()


def _keep(table: dict[int, T], iteration: int, value: T) -> None:
    table[iteration] = value
    if len(table) > MOST_PENDING:
        del table[next(iter(table))]


async def records(llm: Any) -> AsyncIterator[dict[str, Any]]:
    """Statistics of the iterations since the last call.

    Args:
        llm: the library's `LLM`.
    """
    if getattr(getattr(llm, "_executor", None), "rpc_client", None) is not None:
        # There the asynchronous call waits for the answer in the loop.
        for record in await asyncio.to_thread(llm.get_stats, PATIENCE_S):
            yield record
        return
    async for record in llm.get_stats_async(PATIENCE_S):
        yield record
