"""What a closed loop gave: every token of every response with its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from perf.load.timing import Timing


@dataclass(kw_only=True)
class Response(Timing):
    """One response. Tokens count when they reach the dispatcher; `finish_reason` is "" if the loop ended before.

    Attributes:
        index: which request of the loop.
        ids: of the tokens, the end token included.
        writers: model that wrote each token.
        calls: calls made, those whose token was discarded included.
        ran: tokens that forward passes ran for it, by model; what the prefix caches saved is not among them.
        handoffs: how often the next call went to another model.
    """

    index: int
    ids: list[int] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    calls: int = 0
    ran: dict[str, int] = field(default_factory=dict)
    handoffs: int = 0


@dataclass(frozen=True)
class Run:
    """A closed loop.

    Attributes:
        responses: in the order of their start; the last ones are unfinished if the loop ran for a time.
        in_flight: how many ran at once.
        start_s: when the loop started (`time.perf_counter`).
        end_s: when the last answer came, or the time was over.
        cpu_s: CPU seconds by process: each model, ``tritonserver``, ``dispatcher`` (the load is generated there too).
    """

    responses: Sequence[Response]
    in_flight: int
    start_s: float
    end_s: float
    cpu_s: dict[str, float]

    @property
    def tokens(self) -> int:
        return sum(len(response.ids) for response in self.responses)

    @property
    def tokens_per_second(self) -> float:
        """Committed over the whole loop."""
        times = (at_s for response in self.responses for at_s in response.times)
        return sum(self.start_s <= at_s < self.end_s for at_s in times) / (self.end_s - self.start_s)
