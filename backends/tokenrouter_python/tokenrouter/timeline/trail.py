"""The way of requests through the models, as the orchestrator saw it. Times are CLOCK_MONOTONIC in ns."""

from __future__ import annotations

import msgspec

MOST_OF_ONE = 1_000
"""Entries of one request that is followed for itself, because it carries a trace."""


class Budget:
    """How many entries may still be kept; `dropped` are those that came later."""

    __slots__ = ("dropped", "left")

    def __init__(self, most: int | None) -> None:
        self.left = most
        self.dropped = 0

    def take(self, entries: int = 1) -> bool:
        """Whether there is room for so many more, which are then kept."""
        if self.left is None:
            return True
        if self.left < entries:
            self.dropped += entries
            return False
        self.left -= entries
        return True


class Stay(msgspec.Struct, array_like=True):
    """One visit, from its message to the model until the model reported that it is over.

    Attributes:
        visit: its number.
        end_ns: end of the step that it left in; 0 while it goes on.
        tokens: that the model wrote in it.
        source: the model that handed over, or "".
        replica: that of the model where it was.
    """

    model: str
    visit: int
    begin_ns: int
    end_ns: int = 0
    tokens: int = 0
    source: str = ""
    replica: str = ""


class Guessed(msgspec.Struct, array_like=True):
    """News of a request's guesses: so many were made, confirmed, rolled back."""

    at_ns: int
    made: int
    confirmed: int
    rolled_back: int


class Trail(msgspec.Struct, array_like=True, tag=3):
    """One request.

    Attributes:
        request: the orchestrator's number of it.
        prompt_tokens: of the prompt; `before` of the response were written when the trail began.
        begin_ns: when the trail began: the arrival, or later.
        started_ns: when it left the queue; 0 = not yet.
        ended_ns: when it was over; 0 = not yet.
        end: finish reason, or the slug of the error; "" = not yet.
        runs: (model, tokens) in order of position.
        dropped: entries for which there was no room.
    """

    request: int
    policy: str
    prompt_tokens: int
    before: int
    arrived_ns: int
    begin_ns: int
    started_ns: int = 0
    ended_ns: int = 0
    end: str = ""
    stays: list[Stay] = []
    guesses: list[Guessed] = []
    runs: list[tuple[str, int]] = []
    dropped: int = 0


class Follower:
    """Keeps the trail of one request.

    Args:
        trail: what is known when it begins.
        budget: shared by all that are followed together.
    """

    __slots__ = ("_budget", "trail")

    def __init__(self, trail: Trail, budget: Budget) -> None:
        self.trail = trail
        self._budget = budget

    def visit(
        self, model: str, number: int, now_ns: int, *, replica: str = "", source: str = "", left_ns: int = 0
    ) -> None:
        """A visit begins; the one before it is over."""
        self.leave(left_ns or now_ns)
        if self._room():
            self.trail.stays.append(Stay(model, number, now_ns, source=source, replica=replica or model))

    def leave(self, at_ns: int) -> None:
        """The visit that goes on is over, if there is one."""
        stays = self.trail.stays
        if stays and not stays[-1].end_ns:
            stays[-1].end_ns = max(at_ns, stays[-1].begin_ns)

    def wrote(self, model: str, tokens: int) -> None:
        """A model's tokens were committed."""
        runs, stays = self.trail.runs, self.trail.stays
        if runs and runs[-1][0] == model:
            runs[-1] = (model, runs[-1][1] + tokens)
        elif self._room():
            runs.append((model, tokens))
        if stays and stays[-1].model == model and not stays[-1].end_ns:
            stays[-1].tokens += tokens

    def guessed(self, now_ns: int, made: int, confirmed: int, rolled_back: int) -> None:
        """News of guesses, if any."""
        if (made or confirmed or rolled_back) and self._room():
            self.trail.guesses.append(Guessed(now_ns, made, confirmed, rolled_back))

    def over(self, end: str, started_ns: int, now_ns: int) -> None:
        """The request has ended."""
        self.leave(now_ns)
        self.trail.started_ns, self.trail.ended_ns, self.trail.end = started_ns, now_ns, end

    def _room(self) -> bool:
        if self._budget.take():
            return True
        self.trail.dropped += 1
        return False
