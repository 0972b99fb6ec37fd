"""What a fuzz sends, at what, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.fuzz.answers import Answers
from perf.load.known import Verdict
from perf.load.known_loop import Judged
from perf.load.soak.memory import Growth
from perf.load.ways import Endpoints

PROTOCOLS = ("http", "grpc", "v1", "channel")
MEDIAN_S = 0.1
"""A client that asks for something impossible is told so within this time."""


@dataclass(frozen=True)
class Target:
    """A running server on this machine.

    Attributes:
        to: its ports.
        sockets: where its models listen for each other.
        metrics_url: of its metrics page.
        pids: its processes by name.
    """

    to: Endpoints
    sockets: Path
    metrics_url: str
    pids: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """What to send.

    Attributes:
        requests: malformed ones per protocol.
        seed: of the generator; a request follows from it, the protocol and its number.
        clients: that send at once.
        neighbours: sound requests in flight.
        patience_s: after which a malformed request counts as unanswered.
        limit: relative growth of memory that counts as flat.
        first: number of the first request of a protocol.
    """

    requests: int
    seed: int
    protocols: Sequence[str] = PROTOCOLS
    clients: int = 2
    neighbours: int = 4
    patience_s: float = 30.0
    limit: float = 0.05
    first: int = 0


@dataclass
class Round:
    """One protocol's share.

    Attributes:
        stall_s: the longest stall of the probing stream beside it.
        ended: processes that ended.
    """

    answers: Answers
    seconds: float
    stall_s: float
    growth: Sequence[Growth]
    ended: Sequence[str]

    def failures(self) -> list[str]:
        """Everything that must not be."""
        answers = self.answers
        found = [f"process {name} ended" for name in self.ended]
        found += [f"{kind} was not answered: {why}" for kind, why in answers.unanswered[:5]]
        if answers.median_s > MEDIAN_S:
            found.append(f"the median answer took {answers.median_s:.3f} s, more than {MEDIAN_S:g} s")
        return found + [str(growth) for growth in self.growth if not growth.flat]

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.answers.facts(),
            "seconds": round(self.seconds, 1),
            "longest_stall_seconds": round(self.stall_s, 4),
            "growth": [growth.facts() for growth in self.growth],
        }


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        rounds: by protocol.
        calm_stall_s: the longest stall of the probing stream before anything malformed was sent.
        held: gauges that did not return to 0.
    """

    rounds: dict[str, Round] = field(default_factory=dict)
    neighbours: Judged = field(default_factory=Judged)
    calm_stall_s: float = 0.0
    held: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """Everything that must not be; empty for a good server."""
        found = [f"{name}: {failure}" for name, fuzzed in self.rounds.items() for failure in fuzzed.failures()]
        found += [f"neighbour, {other.way}: {other.verdict.value}: {other.error}" for other in self.neighbours.others]
        return found + [f"{gauge} is {value:g} at the end" for gauge, value in self.held.items()]

    def facts(self, plan: Plan) -> dict[str, Any]:
        """For JSON."""
        return {
            "seed": plan.seed,
            "protocols": {name: fuzzed.facts() for name, fuzzed in self.rounds.items()},
            "neighbours": {verdict.value: self.neighbours.verdicts[verdict] for verdict in Verdict},
            "calm_stall_seconds": round(self.calm_stall_s, 4),
            "held_after": self.held,
            "failures": self.failures,
        }
