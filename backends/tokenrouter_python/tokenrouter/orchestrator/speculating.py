"""Speculative hand-off in the orchestrator: relays guesses, applies what checks say, and tells the small model.

The orchestrator owns what is committed; the two models hold guesses as far as they were told. Every guess of a small
model passes here before the large one sees it, so whatever a check reports can be replayed (`walk`) with no question to
anybody: the large model goes on by itself, and the small one is told in one message what became of its guesses.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict

from tokenrouter.errors import ConfigError, InvalidRequest, RouterError
from tokenrouter.messages import Fate, Guesses, ModelInfo, Outcome, ReportRow, Settled, ToSubserver
from tokenrouter.orchestrator.generation import Ahead, Generation
from tokenrouter.orchestrator.lifecycle import AnyEvent, State
from tokenrouter.orchestrator.trails import Trails
from tokenrouter.orchestrator.walk import Walk
from tokenrouter.policies.base import Policy
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Update
from tokenrouter.speculation import Agreement, Speculation
from tokenrouter.statistics import OrchestratorStatistics

log = logging.getLogger(__name__)


class Eligibility:
    """Who may go ahead, and what became of guesses.

    Args:
        speculation: the deployment's setting; None = no request does unless it asks for it.

    Attributes:
        agreement: by name of the policy.
    """

    def __init__(self, speculation: Speculation | None) -> None:
        self.agreement: defaultdict[str, Agreement] = defaultdict(Agreement)
        self._default = speculation is not None
        self._settings = speculation or Speculation()
        self._plain_models: set[str] = set()
        self._told: set[str] = set()

    def track(self, policy: str) -> None:
        """Counts what becomes of this policy's guesses, from 0 on."""
        self.agreement[policy] = Agreement()

    def connected(self, model: str, info: ModelInfo) -> None:
        """A model is there.

        Raises:
            ConfigError: it cannot hold so many guesses.
        """
        if self._default and self._settings.depth >= info.max_context:
            raise ConfigError(
                f"speculation.depth is {self._settings.depth}; model {model!r} has a context of {info.max_context} "
                "tokens: lower the depth"
            )
        self._plain_models.discard(model)
        if not info.speculates:
            self._plain_models.add(model)
            if self._default:
                self._tell_once(f"model {model!r} ({info.engine}) owns its decoding loop")

    def admits(self, request: GenerationRequest, policy: Policy) -> bool:
        """Whether a request's small model may go ahead.

        Raises:
            InvalidRequest: the client asks for it, and it cannot.
        """
        wanted = self._default if request.speculation is None else request.speculation
        if not wanted:
            return False
        why_not = ""
        if len(policy.models) != 2 or not policy.speculates():
            why_not = f"policy {request.policy.name!r} decides by more than logits, hidden states and tokens"
        elif plain := self._plain_models.intersection(policy.models):
            why_not = f"the engine of model {min(plain)!r} owns its decoding loop"
        if why_not and request.speculation:
            raise InvalidRequest(f"speculation is true, but {why_not}: leave speculation out")
        if why_not:
            self._tell_once(why_not)
        return not why_not

    def check_explained(self, request: GenerationRequest, policy: Policy) -> None:
        """Raises InvalidRequest if a request asks why, and a model decides where nobody can look."""
        if request.explain and (plain := self._plain_models.intersection(policy.models)):
            raise InvalidRequest(
                f"explain is true, but the engine of model {min(plain)!r} owns its decoding loop: leave explain out"
            )

    def depth(self, generation: Generation) -> int:
        """Most guesses that the small model may hold in its next visit."""
        if not generation.speculates or not self._plain_models.isdisjoint(generation.policy.models):
            return 0
        agreement = self.agreement[generation.request.policy.name]
        return self._settings.depth if agreement.suffices(self._settings.least_agreement) else 0

    def _tell_once(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            log.info("served without speculation: %s", why)


class Speculating(ABC):
    """The part of the orchestrator that deals with small models that are ahead; see the module's text."""

    statistics: OrchestratorStatistics
    speculation: Eligibility
    trails: Trails
    _unwritten: list[Generation]
    _updates: list[Update]

    @abstractmethod
    def _in_flight_at(self, generation: Generation, model: str) -> int:
        """Running requests at the replica of a model that a request is pinned to."""

    @abstractmethod
    def _send(self, generation: Generation, model: str, message: ToSubserver) -> None: ...

    @abstractmethod
    def _visit(
        self, generation: Generation, model: str, now_ns: int, *, source: str = "", left_ns: int = 0
    ) -> None: ...

    @abstractmethod
    def _finish(self, generation: Generation, event: AnyEvent, update: Update | None = None) -> None: ...

    @abstractmethod
    def _fail(self, generation: Generation, event: AnyEvent, error: RouterError) -> None: ...

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

    def agreement(self, generation: Generation) -> Agreement:
        """That of the request's policy."""
        return self.speculation.agreement[generation.request.policy.name]

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
