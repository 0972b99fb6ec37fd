"""The steps of one model, as its runner saw them. Times are CLOCK_MONOTONIC in ns."""

from __future__ import annotations

import msgspec

from tokenrouter.timeline.trail import Budget


class Member(msgspec.Struct, array_like=True):
    """A request's part in a step.

    Attributes:
        peer: the orchestrator whose request it is.
        visit: number of the stay.
        tokens: new ones that were run.
        ready_ns: since when it could have taken part.
    """

    peer: int
    request: int
    visit: int
    tokens: int
    ready_ns: int


class Step(msgspec.Struct, array_like=True, tag=2):
    """One step; of an engine that owns its loop a submission, whose end is not known (`end_ns` = `start_ns`).

    Attributes:
        reason: why it started, see `batcher.Reason`.
        in_flight, threshold: n and B(n) when that was decided.
        checked: positions decided by checking guesses.
        running: requests in the batch, those included that an engine which owns its loop runs already.
    """

    start_ns: int
    end_ns: int
    reason: str
    in_flight: int
    threshold: int
    checked: int
    running: int
    members: list[Member]

    @property
    def new_tokens(self) -> int:
        return sum([member.tokens for member in self.members])


class StepLog:
    """Keeps steps.

    Args:
        most: entries, a step and each of its members being one; None = all.
    """

    def __init__(self, most: int | None) -> None:
        self.budget = Budget(most)
        self.steps: list[Step] = []

    def add(self, step: Step) -> None:
        """A step is over."""
        if self.budget.take(1 + len(step.members)):
            self.steps.append(step)
