"""What a run counts: batches, waits, tokens, and latencies of requests. Times in ns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.response import Result


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one model, for timelines and traces.

    Attributes:
        requests: who took part, in the order of the batch.
        extended_tokens: new tokens beyond one per request.
        reason: why it started, see `batcher.Reason`.
    """

    model: str
    start_ns: int
    end_ns: int
    requests: tuple[int, ...]
    extended_tokens: int
    reason: str


@dataclass(slots=True)
class ReplicaCounts:
    """Sums over the steps of one replica. `requests`: of finished steps; `started`: of steps that began."""

    steps: int = 0
    requests: int = 0
    started: int = 0
    wait_ns: int = 0
    busy_ns: int = 0


class Meter:
    """Counts everything from the last `reset` on; who waits since when survives it.

    Args:
        model_of: index of the model of each replica; arrays are in the order of replicas, moves in that of models.

    Attributes:
        replicas: what each has done.
        peak_in_flight: most requests that ran at once.
    """

    def __init__(self, model_of: Sequence[int]) -> None:
        self.model_of = tuple(model_of)
        self._models = max(model_of) + 1
        self._ready_ns: dict[tuple[int, int], int] = {}
        self._arrived_ns: dict[int, int] = {}
        self._last_token_ns: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self._last_ns = 0
        self.reset(0)

    def reset(self, now_ns: int) -> None:
        """Counting starts now."""
        self.start_ns = now_ns
        self.tokens = 0
        self.finished = 0
        self.instants = 0
        self.in_flight_ns = 0
        self.peak_in_flight = 0
        self.replicas = [ReplicaCounts() for _ in self.model_of]
        self.moves = [[0] * self._models for _ in range(self._models)]
        self.first_token_ns = array("q")
        self.inter_token_ns = array("q")
        self.end_to_end_ns = array("q")
        self._marks = [self._mark(now_ns)]

    def instant(self, now_ns: int, in_flight: int) -> None:
        """Time moved on; `in_flight` requests ran since the last instant."""
        self.instants += 1
        self.in_flight_ns += in_flight * (now_ns - self._last_ns)
        self.peak_in_flight = max(self.peak_in_flight, in_flight)
        self._last_ns = now_ns

    def arrived(self, request: int, now_ns: int) -> None:
        self._arrived_ns[request] = now_ns

    def ready(self, replica: int, request: int, now_ns: int) -> None:
        """A request, or news of its guesses, reached a replica."""
        self._ready_ns[replica, request] = now_ns

    def step_started(self, replica: int, step: Step) -> None:
        """A step begins; the waits of its requests are over."""
        self._running[replica] = step.start_ns
        counts, ready_ns, requests = self.replicas[replica], self._ready_ns, step.requests
        counts.started += len(requests)
        start_ns = step.start_ns
        counts.wait_ns += len(requests) * start_ns - sum([ready_ns.pop((replica, each), start_ns) for each in requests])

    def step_finished(self, replica: int, step: Step) -> None:
        del self._running[replica]
        counts = self.replicas[replica]
        counts.steps += 1
        counts.requests += len(step.requests)
        counts.busy_ns += step.end_ns - max(step.start_ns, self.start_ns)

    def busy_ns(self, replica: int, now_ns: int) -> int:
        """Time that a replica was busy, its running step included."""
        start_ns = self._running.get(replica, now_ns)
        return self.replicas[replica].busy_ns + now_ns - max(start_ns, self.start_ns)

    def row(self, replica: int, row: ReportRow, target: int, now_ns: int) -> None:
        """What became of one request of a finished step; `target` is the model it goes on at."""
        if row.outcome == Outcome.STAY or row.outcome == Outcome.LEAVE:
            self.moves[self.model_of[replica]][target] += 1
        if row.outcome == Outcome.STAY or row.guesses:
            self._ready_ns[replica, row.request] = now_ns

    def token(self, request: int, count: int, now_ns: int) -> None:
        """A response goes on."""
        self.tokens += count
        last_ns = self._last_token_ns.get(request)
        self._last_token_ns[request] = now_ns
        if last_ns is None:
            self.first_token_ns.append(now_ns - self._arrived_ns.pop(request))
        else:
            self.inter_token_ns.append(now_ns - last_ns)

    def ended(self, request: int, result: Result) -> None:
        self.finished += 1
        self.end_to_end_ns.append(result.last_token_ns - result.arrived_ns)
        self._last_token_ns.pop(request, None)

    def cut(self, now_ns: int) -> None:
        """A segment of the run ends; standard errors come from the spread over segments."""
        self._marks.append(self._mark(now_ns))

    def segments(self) -> npt.NDArray[np.float64]:
        """[K, 2 + M * M] per segment: ns, tokens, and moves from model to model (row-major)."""
        return np.diff(np.array(self._marks, dtype=np.float64), axis=0)

    def _mark(self, now_ns: int) -> list[int]:
        return [now_ns, self.tokens, *(count for row in self.moves for count in row)]
