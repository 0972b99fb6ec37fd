"""What checked guesses mean for a response: the walk of `subserver.check`, drawn again from what it reported.

The orchestrator relays guesses, so it knows those that the large model knew, and those that came meanwhile: of them too
the small model's run counts up to where it left next. The large model gets the same guesses and concludes the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.orchestrator.generation import Generation
from tokenrouter.response import Update
from tokenrouter.speculation import Agreement
from tokenrouter.statistics import OrchestratorStatistics


class Walk:
    """Commits what a report says about a request with guesses, in order of position.

    Args:
        generation: the request; its `ahead` is not None.
        statistics: of the orchestrator.
        agreement: of the request's policy.
        now_ns: time of the commits.

    Attributes:
        update: what was committed, for the client; None if nothing was.
        ended: how the response ended, or None.
        stands: positions of the response from here on are no longer as guessed; None if all guesses still hold.
        back: whether the small model writes next; `returned`: whether the last decision was to hand back to it.
        wrote: tokens of the small model among those committed; `left`: how often it left again.
    """

    def __init__(
        self, generation: Generation, statistics: OrchestratorStatistics, agreement: Agreement, *, now_ns: int
    ) -> None:
        assert generation.ahead is not None
        self.update: Update | None = None
        self.ended: Outcome | None = None
        self.stands: int | None = None
        self.back = self.returned = False
        self.wrote = self.left = 0
        self._generation = generation
        self._ahead = generation.ahead
        self._statistics = statistics
        self._agreement = agreement
        self._now_ns = now_ns

    def replay(self, row: ReportRow) -> None:
        """The large model's decisions, and what of the small model's run counts between them."""
        large = self._generation.visits.at
        returned = row.returned or [row.outcome == Outcome.LEAVE] * len(row.tokens)
        values = row.log_probs or []
        decisions = row.decisions or []
        for i, (token, back) in enumerate(zip(row.tokens, returned, strict=True)):
            self._generation.decisions += decisions[i : i + 1]
            self._decided(large, token, values[i : i + 1])
            if self.ended is not None:
                return
            self.returned = back
            if back:
                self._generation.hand_off(self._statistics)
                self.back = True
                self.leader_writes()
            if self.ended is not None or self.back or self.stands is not None:
                return

    def leader_writes(self) -> None:
        """The small model writes again: its run counts up to where it left next, where the large one is asked."""
        ahead = self._ahead
        if self.stands is None and ahead.end < len(self._generation.transcript.tokens):
            self.stands = ahead.end
        if self.stands is not None:
            return
        run = []
        while ahead.guesses and not ahead.guesses[0].left:
            run.append(ahead.guesses.popleft())
        if run:
            self._generation.decisions += [guess.decision for guess in run if guess.decision is not None]
            values = [guess.log_prob for guess in run if guess.log_prob is not None]
            self.wrote += self._commit(ahead.leader, [guess.token for guess in run], values)
            self._agreement.confirmed += len(run)
        if ahead.guesses and self.ended is None:
            self._generation.hand_off(self._statistics)
            if (why := ahead.guesses[0].decision) is not None:
                self._generation.decisions.append(why)
            self.left += 1
            self.back = False
            ahead.entered = True

    def _decided(self, large: str, token: int, log_probs: Sequence[float]) -> None:
        """The large model wrote a token; it is compared with the guess at its position, if there is one."""
        ahead = self._ahead
        position = len(self._generation.transcript.tokens)
        self._commit(large, [token], list(log_probs))
        if ahead.guesses:
            agreed = ahead.guesses[0].token == token
            if ahead.entered:
                self._generation.compared(agreed, self._agreement)
            if agreed:
                ahead.guesses.popleft()
                self._agreement.confirmed += 1
            else:
                self.stands = position
        ahead.entered = False

    def _commit(self, model: str, tokens: list[int], log_probs: list[float]) -> int:
        generation = self._generation
        transcript, before = generation.transcript, len(generation.transcript.tokens)
        self.update = generation.commit(
            model, tokens, log_probs, self._statistics, now_ns=self._now_ns, update=self.update
        )
        self.ended = generation.ended()
        return len(transcript.tokens) - before
