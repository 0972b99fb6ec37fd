"""What is compared: systems, and the cells in which they are measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tools.errors import CommandError

ANY = "any"
"""In the place of a policy: without routing it makes no difference."""


@dataclass(frozen=True)
class System:
    """One way to serve.

    Attributes:
        name: in tables and files.
        where: ``tuned`` or ``eager`` server, ``process``, or ``standard``; ``tuned, ...`` is a server of its own.
        text: one line for the page.
        model: that is called directly, past the entry model; "" for systems in which a policy routes.
        ahead: requests ask for speculative hand-off, so only policies that allow it are measured.
        beside: changes the repository before it is served, and runs what belongs to it.
    """

    name: str
    where: str
    text: str
    model: str = ""
    ahead: bool = False
    beside: Callable[[Path], AbstractContextManager[None]] = lambda repository: nullcontext()

    @property
    def routed(self) -> bool:
        """Whether a policy routes."""
        return not self.model

    def takes(self, policy: str, *, real: bool) -> bool:
        """Whether it can be measured with this policy; speculation needs `real` models, which agree as models do."""
        return not self.ahead or (real and policy in SPECULATING)


OURS, MODEL_SYNC = "tokenrouter", "model-sync tuned"
SPECULATING = ("r2r", "citer", "collm", "rstitch", "random", "markov")
SYSTEMS: tuple[System, ...] = (
    System(OURS, "tuned", "this server, thresholds from the Markov model"),
    System("speculative", "tuned", "this server with the same thresholds, every request speculative", ahead=True),
    System("eager", "eager", "this server with every threshold 1: asynchronous, not delayed"),
    System("large only", "eager", "the large model alone, called directly", "large"),
    System("small only", "eager", "the small model alone, called directly", "small"),
    System("lock-step", "process", "one loop; models step one after the other over the whole batch (official style)"),
    System("step-sync", "process", "one loop; all models step at the same time, then wait for the slowest"),
    System("model-sync", "process", "one loop; one model at a time, the one with most requests"),
    System(MODEL_SYNC, "process", "one loop; one model at a time, larger ones from a tuned threshold on"),
    System("standard", "standard", "one server per model, a call per token, an external dispatcher that routes"),
)
BY_NAME = {system.name: system for system in SYSTEMS}


@dataclass(frozen=True)
class Cell:
    """One policy under one workload at one number in flight."""

    policy: str
    workload: str
    in_flight: int

    def of(self, system: System) -> Cell:
        """The cell under which a system's numbers are kept."""
        return self if system.routed else Cell(ANY, self.workload, self.in_flight)


def named(system: str) -> System:
    """Raises CommandError if there is no such system."""
    if system not in BY_NAME:
        raise CommandError(f"--systems: no system {system!r}; there are {', '.join(BY_NAME)}")
    return BY_NAME[system]
