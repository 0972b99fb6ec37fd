"""What is asked of a deployment: arrivals, lengths, and how fast answers have to come."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tokenrouter.messages import PolicySpec, Sampling
from tokenrouter.request import GenerationRequest
from tools.errors import CommandError
from tools.json_lines import read_json_lines

Lengths = Literal["geometric", "fixed"]


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a recorded trace.

    Attributes:
        at_s: when it came, in seconds.
        prompt_tokens: of its prompt.
        output_tokens: of its response.
    """

    at_s: Annotated[float, msgspec.Meta(ge=0)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Demand:
    """Requests that arrive whether others are done or not.

    Attributes:
        rate: arrivals per second, Poisson; of a trace, which runs as fast as that.
        prompt_tokens: tokens of every prompt; a trace has its own.
        output_tokens: mean tokens of a response; a trace has its own.
        lengths: how those of responses are distributed.
        trace: arrivals in order of time, repeated without end; empty for Poisson arrivals.
        every: only each so-many-th arrival comes, for a slice of a fleet, 1 or more. So the slice sees the fluctuations
            that the fleet sees: those of arrivals at the rate of a slice would be larger.
    """

    rate: float
    prompt_tokens: int = 1
    output_tokens: float = 1.0
    lengths: Lengths = "geometric"
    trace: tuple[Arrival, ...] = ()
    every: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"--rate: {self.rate:g}; give a positive number of requests per second")
        if self.prompt_tokens < 1:
            raise ValueError(f"--prompt-tokens: {self.prompt_tokens}; give 1 or more")
        if not (math.isfinite(self.output_tokens) and self.output_tokens >= 1):
            raise ValueError(f"--output-tokens: {self.output_tokens:g}; give 1 or more")

    @property
    def arrivals_per_second(self) -> float:
        """Of those that come."""
        return self.rate / self.every

    @cached_property
    def mean_prompt(self) -> float:
        """Tokens."""
        return _mean([each.prompt_tokens for each in self.trace]) if self.trace else self.prompt_tokens

    @cached_property
    def mean_output(self) -> float:
        """Tokens."""
        return _mean([each.output_tokens for each in self.trace]) if self.trace else self.output_tokens


@dataclass(frozen=True)
class Objectives:
    """What has to hold, in ms."""

    ttft_p99_ms: float
    itl_p99_ms: float

    def __post_init__(self) -> None:
        for option, value in (("--ttft-p99-ms", self.ttft_p99_ms), ("--itl-p99-ms", self.itl_p99_ms)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{option}: {value:g}; give a positive number of milliseconds")


def trace_demand(path: Path, rate: float | None) -> Demand:
    """The demand that a JSON Lines file of `Arrival` records.

    Args:
        rate: how fast it runs, in requests per second; None = as recorded.

    Raises:
        CommandError: names the line or field that is wrong.
    """
    trace = read_json_lines(path, Arrival)
    if len(trace) < 2 or trace[-1].at_s <= trace[0].at_s:
        raise CommandError(f"--trace {path}: {len(trace)} arrivals; give at least two, at different times")
    for number, (one, other) in enumerate(pairwise(trace), start=2):
        if other.at_s < one.at_s:
            raise CommandError(f"--trace {path}:{number}: at_s {other.at_s:g} is before {one.at_s:g}; sort the lines")
    recorded = (len(trace) - 1) / (trace[-1].at_s - trace[0].at_s)
    demand = Demand(recorded, trace=tuple(trace))
    return demand if rate is None else replace(demand, rate=rate)


@dataclass
class Source:
    """Draws requests and the times between them; the same seed gives the same ones, whatever the deployment.

    Arrivals scale with the rate and nothing else changes, so that rates and deployments are compared on the same luck.

    Attributes:
        demand: what is drawn from.
        policy: of every request.
        seed: of everything.
        room: tokens for which a replica has KV; responses that would be longer end there.
    """

    demand: Demand
    policy: PolicySpec
    seed: int
    room: int | None = None
    _number: int = field(default=-1, init=False)
    _taken: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._arrivals = random.Random(f"arrivals {self.seed}")
        self._requests = random.Random(f"requests {self.seed}")
        self._length = self._lengths(self._requests)

    def gap_ns(self) -> int:
        """Time to the next arrival."""
        trace, rate = self.demand.trace, self.demand.rate
        every = self.demand.every
        if not trace:
            units = self._arrivals.expovariate(1.0) if every == 1.0 else self._arrivals.gammavariate(every, 1.0)
            return round(units / rate * 1e9)
        before, self._taken = self._number, self._taken + 1
        self._number = math.floor(self._taken * every)
        recorded_s = (trace[-1].at_s - trace[0].at_s) / (len(trace) - 1)
        return round((self._recorded_s(self._number) - self._recorded_s(before)) / (recorded_s * rate) * 1e9)

    def _recorded_s(self, number: int) -> float:
        """When the arrival of a number came, in a trace that is repeated with a mean gap in between."""
        trace = self.demand.trace
        length_s = trace[-1].at_s - trace[0].at_s
        rounds, place = divmod(number, len(trace))
        return rounds * length_s * len(trace) / (len(trace) - 1) + trace[place].at_s

    def request(self) -> GenerationRequest:
        """The request that arrives now."""
        if self.demand.trace:
            arrival = self.demand.trace[max(0, self._number) % len(self.demand.trace)]
            return self._request(arrival.prompt_tokens, arrival.output_tokens)
        return self._request(self.demand.prompt_tokens, self._length())

    def residents(self, count: int) -> list[GenerationRequest]:
        """Requests as they are found running at some time: long ones more often, each anywhere in its response."""
        draws = random.Random(f"residents {self.seed}")
        if self.demand.trace:
            found = [(each.prompt_tokens, each.output_tokens) for each in self.demand.trace]
        else:
            length = self._lengths(draws)
            found = [(self.demand.prompt_tokens, length()) for _ in range(4 * count)]
        chosen = draws.choices(found, weights=[output for _, output in found], k=count) if count else []
        running = []
        for prompt, output in chosen:
            output = self._fitting(prompt, output)
            done = draws.randrange(output)
            running.append(self._request(prompt + done, output - done, draws))
        return running

    def _request(self, prompt: int, output: int, draws: random.Random | None = None) -> GenerationRequest:
        output = self._fitting(prompt, output)
        return GenerationRequest(
            prompt="",
            tokens=[0] * prompt,
            sampling=Sampling(max_tokens=output, seed=(draws or self._requests).getrandbits(64)),
            stop_words=(),
            policy=self.policy,
            stream=False,
        )

    def _fitting(self, prompt: int, output: int) -> int:
        """As many tokens of a response as there is room for, at least one."""
        return output if self.room is None else max(1, min(output, self.room - prompt))

    def _lengths(self, draws: random.Random) -> Callable[[], int]:
        mean = self.demand.output_tokens
        if self.demand.lengths == "fixed" or mean == 1:
            return lambda: round(mean)
        scale = math.log1p(-1.0 / mean)
        return lambda: 1 + int(math.log(1.0 - draws.random()) / scale)


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
