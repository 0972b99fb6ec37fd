"""What clients do: closed loop or Poisson arrivals, and how long the responses are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tokenrouter.messages import PolicySpec, Sampling
from tokenrouter.request import GenerationRequest

Shape = Literal["fixed", "geometric"]

_ENDLESS_TOKENS = 1 << 40  # a million such requests fit the KV ledger


@dataclass(frozen=True)
class Load:
    """The requests of a run.

    Attributes:
        inflight: requests in flight (closed loop), or the most that are admitted at once (open loop).
        rate: arrivals per second, Poisson; None is the closed loop: whenever a response ends, another begins at once.
        response_tokens: mean tokens of a response; None: responses never end, as in the Markov model.
        shape: whether all responses have that length, or lengths are geometric.
        prompt_tokens: tokens of every prompt; a model's first step on a request extends over them.
        seed: of arrivals, lengths and routing draws.
    """

    inflight: int
    rate: float | None = None
    response_tokens: float | None = None
    shape: Shape = "fixed"
    prompt_tokens: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.inflight < 1 or self.prompt_tokens < 1:
            raise ValueError("inflight and prompt_tokens are at least 1")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate: {self.rate:g}; give a positive number of requests per second")
        if self.rate is not None and self.response_tokens is None:
            raise ValueError("rate: requests that arrive have to end; give response_tokens")
        if self.response_tokens is not None and not 1 <= self.response_tokens < _ENDLESS_TOKENS:
            raise ValueError(f"response_tokens: {self.response_tokens:g}; give 1 or more")


class Clients:
    """Draws requests and arrival times; the same seed gives the same ones, whatever the scheduler does."""

    def __init__(self, load: Load, policy: PolicySpec, *, stream: bool = False) -> None:
        self._load = load
        self._stream = stream
        self._policy = policy
        self._requests = random.Random(f"requests {load.seed}")
        self._arrivals = random.Random(f"arrivals {load.seed}")
        self._length = self._lengths()

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            prompt="",
            tokens=[0] * self._load.prompt_tokens,
            sampling=Sampling(max_tokens=self._length(), seed=self._requests.getrandbits(64)),
            stop_words=(),
            policy=self._policy,
            stream=self._stream,
        )

    def gap_ns(self) -> int:
        """Time to the next arrival of the open loop."""
        assert self._load.rate is not None
        return round(self._arrivals.expovariate(self._load.rate) * 1e9)

    def _lengths(self) -> Callable[[], int]:
        mean = self._load.response_tokens
        if mean is None:
            return lambda: _ENDLESS_TOKENS
        if self._load.shape == "fixed" or mean == 1:
            return lambda: round(mean)
        scale = math.log1p(-1.0 / mean)
        return lambda: 1 + int(math.log(1.0 - self._requests.random()) / scale)
