"""Speculative hand-off in the orchestrator: relays guesses, applies what checks say, and tells the small model.

The orchestrator owns what is committed; the two models hold guesses as far as they were told. Every guess of a small
model passes here before the large one sees it, so whatever a check reports can be replayed (`walk`) with no question to
anybody: the large model goes on by itself, and the small one is told in one message what became of its guesses.
"""

from __future__ import annotations

from tokenrouter.messages import Fate, Guesses, Outcome, ReportRow, Settled
from tokenrouter.orchestrator.generation import Ahead, Generation
from tokenrouter.orchestrator.lifecycle import State
from tokenrouter.orchestrator.visiting import Visiting
from tokenrouter.orchestrator.walk import Walk


class Speculating(Visiting):
    """The part of the orchestrator that deals with small models that are ahead; see the module's text."""

    # --- what the small model reports -----------------------------------------------------------------------------

    def _guessed(self, generation: Generation, ahead: Ahead, row: ReportRow) -> None:
        """Further guesses, while the large model writes."""
        start, guesses = ahead.end, row.guesses or []
        generation.happens(row.outcome)
        if not ahead.add(guesses, generation.transcript.tokens):
            self.agreement(generation).rolled_back += len(guesses)
            self._settle(generation, ahead, ahead.end, Fate.ROLLED_BACK)
            generation.ahead = None
        elif generation.state is State.VISITING:
            visits = generation.visits
            number = self._in_flight_at(generation, visits.at)
            message = Guesses(generation.key, visits.number, number, start, guesses)
            self._send(generation, visits.at, message)

    def _ran_on(self, generation: Generation, row: ReportRow, left_ns: int, now_ns: int) -> None:
        """Guesses of a small model that was told meanwhile that it writes: they count up to where it left."""
        leader, tokens = generation.visits.at, generation.transcript.tokens
        ahead = generation.ahead = Ahead(leader, row.visit, len(tokens))
        ahead.add(row.guesses or [], tokens)
        walk = self._walk(generation, now_ns)
        walk.leader_writes()
        self._publish(generation, walk)
        generation.visits.seen[leader] = len(tokens)
        if walk.ended is not None:
            self._finish(generation, walk.ended, walk.update)
        elif ahead.guesses:
            generation.happens(Outcome.LEAVE)
            generation.visits.carried = None
            self._visit(generation, generation.policy.other(leader), now_ns, source=leader, left_ns=left_ns)
        else:
            generation.ahead = None
            generation.happens(row.outcome)

    # --- what the large model reports -----------------------------------------------------------------------------

    def _checked(self, generation: Generation, ahead: Ahead, row: ReportRow, left_ns: int, now_ns: int) -> bool:
        """The large model decided positions for which there may be guesses.

        Returns whether the rest of the row is left to do: it ends otherwise than a check does.
        """
        walk = self._walk(generation, now_ns)
        walk.replay(row)
        self._publish(generation, walk)
        if walk.ended is not None:
            if walk.wrote or walk.left:
                self._settle(generation, ahead, len(generation.transcript.tokens), Fate.CHECKED, walk)
            self._finish(generation, walk.ended, walk.update)
            return False
        if row.outcome in (Outcome.LOST, Outcome.FAILED):
            return True
        astray = row.outcome == Outcome.LEAVE and not walk.returned
        holds = walk.stands is None and not astray and (ahead.going or not walk.back)
        length = min(len(generation.transcript.tokens), ahead.end) if walk.stands is None else walk.stands
        if not holds:
            self.agreement(generation).rolled_back += len(ahead.guesses)
            generation.ahead = None
        fate = (Fate.CONFIRMED if walk.back else Fate.CHECKED) if holds else Fate.ROLLED_BACK
        self._settle(generation, ahead, length, fate, walk)
        if astray:
            generation.decisions += (row.decisions or [])[len(row.tokens) :]
            return True
        generation.happens(Outcome.LEAVE if walk.back else Outcome.STAY)
        if walk.back:
            self._hand_back(generation, ahead, holds, left_ns, now_ns)
        return False

    def _hand_back(self, generation: Generation, ahead: Ahead, holds: bool, left_ns: int, now_ns: int) -> None:
        """The small model writes next: from where it is already, or from what it has to be told."""
        visits = generation.visits
        source, generation.ahead = visits.at, None
        visits.seen[source] = len(generation.transcript.tokens)
        visits.carried = None
        if holds:
            visits.at, visits.number = ahead.leader, ahead.visit
            if generation.follower is not None:
                self.trails.visited(generation, generation.follower, now_ns, source=source, left_ns=left_ns)
        else:
            self._visit(generation, ahead.leader, now_ns, source=source, left_ns=left_ns)

    # --- both -----------------------------------------------------------------------------------------------------

    def _walk(self, generation: Generation, now_ns: int) -> Walk:
        return Walk(generation, self.statistics, self.agreement(generation), now_ns=now_ns)

    def _publish(self, generation: Generation, walk: Walk) -> None:
        if walk.update is not None:
            self._unwritten.append(generation)
            if generation.request.stream and walk.ended is None:
                self._updates.append(walk.update)

    def _settle(self, generation: Generation, ahead: Ahead, length: int, fate: Fate, walk: Walk | None = None) -> None:
        """Tells the small model what became of its guesses, if it is still there."""
        if not ahead.going:
            return
        wrote, left = (walk.wrote, walk.left) if walk is not None else (0, 0)
        generation.visits.seen[ahead.leader] = length
        number = self._in_flight_at(generation, ahead.leader)
        message = Settled(generation.key, ahead.visit, number, length, wrote, left, fate)
        self._send(generation, ahead.leader, message)
