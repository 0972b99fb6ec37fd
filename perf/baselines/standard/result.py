"""What a closed loop gave: every token of every response with its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Response:
    """One response. Times are `time.perf_counter`, in seconds.

    Attributes:
        index: which request of the loop.
        seed: its seed.
        started: when its first call was made.
        tokens: ids, the end token included.
        writers: model that wrote each token.
        times: when each token reached the dispatcher.
        calls: calls made, those whose token was discarded included.
        ran: tokens that forward passes ran for it, by model; what the prefix caches saved is not among them.
        handoffs: how often the next call went to another model.
        finish_reason: ``stop``, ``length``, or "" if the loop ended before.
    """

    index: int
    seed: int
    started: float
    tokens: list[int] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    calls: int = 0
    ran: dict[str, int] = field(default_factory=dict)
    handoffs: int = 0
    finish_reason: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.started

    @property
    def inter_token_s(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def latency_s(self) -> float:
        """Time to the last token."""
        return self.times[-1] - self.started


@dataclass(frozen=True)
class Run:
    """A closed loop.

    Attributes:
        responses: in the order of their start; the last ones are unfinished if the loop ran for a time.
        in_flight: how many ran at once.
        started: when the loop started (`time.perf_counter`).
        ended: when the last answer came, or the time was over.
        cpu_s: CPU seconds by process: each model, ``tritonserver``, ``dispatcher`` (the load is generated there too).
    """

    responses: Sequence[Response]
    in_flight: int
    started: float
    ended: float
    cpu_s: dict[str, float]

    @property
    def finished(self) -> list[Response]:
        """Complete responses."""
        return [response for response in self.responses if response.finish_reason]

    @property
    def tokens(self) -> int:
        """Committed tokens of all responses."""
        return sum(len(response.tokens) for response in self.responses)

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second over the whole loop."""
        return self.rate(self.started, self.ended)

    @property
    def cpu_s_per_1000_tokens(self) -> dict[str, float]:
        """By process."""
        return {name: 1e3 * seconds / max(1, self.tokens) for name, seconds in self.cpu_s.items()}

    def rate(self, start: float, end: float) -> float:
        """Committed tokens per second in [start, end)."""
        return sum(start <= time < end for response in self.responses for time in response.times) / (end - start)
