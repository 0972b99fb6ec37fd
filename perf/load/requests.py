"""The requests of one cell: every system gets the same ones, in the same order, in a closed loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from perf.load.timing import Timing

Prompts = Callable[[int], list[int]]
"""Token ids of a prompt by its index."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        index: place in the order of all requests; also the seed.
        input_ids: the prompt.
        max_tokens: of the response.
        whole: false for the first ones, whose responses are cut so that they do not all end together.
    """

    index: int
    input_ids: list[int]
    max_tokens: int
    whole: bool

    @property
    def seed(self) -> int:
        """Of the sampler and of policies that draw."""
        return 1_000_003 * (self.index + 1)


@dataclass(frozen=True)
class Load:
    """A closed loop: whenever a response ends, the next request starts.

    Attributes:
        in_flight: requests at once.
        prompts: see `Prompts`.
        response_tokens: most tokens of a response.
        warm_up_s: before the window in which tokens are counted.
        seconds: least length of the window. It stays open until `in_flight` whole responses have ended, at most
            `longest_s`.
    """

    in_flight: int
    prompts: Prompts
    response_tokens: int
    warm_up_s: float = 1.0
    seconds: float = 4.0
    longest_s: float = 60.0

    def request(self, index: int) -> Request:
        """The request at this place. The first ones end one after the other, as in a loop that ran for long."""
        if index >= self.in_flight:
            return Request(index, self.prompts(index), self.response_tokens, True)
        tokens = -(-self.response_tokens * (index + 1) // self.in_flight)
        return Request(index, self.prompts(index), tokens, False)

    def over(self, elapsed_s: float, whole: int) -> bool:
        """Whether to stop, so many seconds after the start and with so many whole responses ended."""
        open_s = elapsed_s - self.warm_up_s
        return open_s >= self.seconds and (whole >= self.in_flight or open_s >= self.longest_s)


@dataclass(kw_only=True)
class Response(Timing):
    """What came back of one request: the tokens, and whether the last one is among them."""

    request: Request
    ids: list[int] = field(default_factory=list)
    ended: bool = False

    def arrived(self, at_s: float, ids: Sequence[int]) -> None:
        self.add(len(ids), at_s)
        self.ids.extend(ids)


@dataclass(frozen=True)
class Run:
    """Everything that was measured of one system in one cell; tokens count from `start_s` to `end_s`."""

    responses: list[Response]
    start_s: float
    end_s: float

    @property
    def tokens_per_second(self) -> float:
        """Of all responses together, in the window."""
        arrivals = (pair for response in self.responses for pair in zip(response.times, response.counts, strict=True))
        tokens = sum(count for at_s, count in arrivals if self.start_s <= at_s < self.end_s)
        return tokens / (self.end_s - self.start_s)


def random_prompts(tokens: int, vocab_size: int) -> Prompts:
    """Prompts of a length, all different but for chance; an index gives the same one everywhere."""
    return lambda index: np.random.default_rng(index).integers(0, vocab_size, tokens).tolist()
