"""Which requests are followed: all while somebody records, and for themselves those that carry a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.orchestrator.generation import Generation
from tokenrouter.speculation import Agreement
from tokenrouter.timeline.trail import MOST_OF_ONE, Budget, Follower, Trail

Traced = Callable[[Generation, Trail], None]


class Trails:
    """See the module's text. Nobody is followed by default, and then nothing is kept.

    Attributes:
        traced: told the trail of every request with a trace, once it is over; None = these are not followed.
    """

    def __init__(self) -> None:
        self.traced: Traced | None = None
        self._budget: Budget | None = None
        self._over: list[Trail] = []

    def start(self, running: Iterable[Generation], most: int | None, now_ns: int) -> None:
        """From now on all requests are followed; those that run too, from here."""
        self._budget = Budget(most)
        self._over = []
        for generation in running:
            self.arrived(generation, now_ns)
            if generation.follower is not None and generation.visits.at:
                self.visited(generation, generation.follower, now_ns)

    def stop(self, running: Iterable[Generation]) -> tuple[list[Trail], int]:
        """No longer. All trails, and how many entries found no room."""
        found, dropped = self._over, 0 if self._budget is None else self._budget.dropped
        self._budget, self._over = None, []
        for generation in running:
            if (follower := generation.follower) is not None:
                follower.trail.started_ns = generation.started_ns
                found.append(follower.trail)
                if generation.request.trace is None:
                    generation.follower = None
        return found, dropped

    def arrived(self, generation: Generation, now_ns: int) -> None:
        """A request is there: it is followed if it has to be, and is not yet."""
        traced = self.traced is not None and generation.request.trace is not None
        if generation.follower is not None or (self._budget is None and not traced):
            return
        written = len(generation.transcript.tokens)
        begin_ns = now_ns if generation.visits.at else generation.arrived_ns
        trail = Trail(
            generation.key,
            generation.request.policy.name,
            len(generation.request.tokens),
            written,
            generation.arrived_ns,
            begin_ns,
            stays=[],
            guesses=[],
            runs=[],
        )
        generation.follower = Follower(trail, self._budget or Budget(MOST_OF_ONE))

    def visited(
        self, generation: Generation, follower: Follower, now_ns: int, *, source: str = "", left_ns: int = 0
    ) -> None:
        """A request that is followed begins a visit."""
        visits = generation.visits
        replica = generation.pins.get(visits.at, visits.at)
        follower.visit(visits.at, visits.number, now_ns, replica=replica, source=source, left_ns=left_ns)

    def over(self, generation: Generation, follower: Follower, end: str, now_ns: int) -> None:
        """A request that was followed has ended."""
        follower.over(end, generation.started_ns, now_ns)
        if self._budget is not None:
            self._over.append(follower.trail)
        if self.traced is not None and generation.request.trace is not None:
            self.traced(generation, follower.trail)

    @contextmanager
    def guesses(
        self, generation: Generation, follower: Follower, found: Agreement, row: ReportRow, now_ns: int
    ) -> Iterator[None]:
        """The block deals with a report; what it means for guesses is added to the trail."""
        confirmed, rolled_back = found.confirmed, found.rolled_back
        yield
        went_ahead = row.outcome == Outcome.AHEAD or (row.outcome == Outcome.LEAVE and generation.ahead is not None)
        made = len(row.guesses or ()) if went_ahead else 0
        follower.guessed(now_ns, made, found.confirmed - confirmed, found.rolled_back - rolled_back)
