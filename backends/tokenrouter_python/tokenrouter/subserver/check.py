"""A check: the large model's walk over a request's guesses, on the logits of one step.

The rule is that of plain routing, read off logits that are there already. A position is decided as ever: the large
model's token is sampled and committed, its policy says stay or return. Then, if the small model guessed that token too,

* and the large one stays: the next position, if its logits are there;
* and it returns: the small model's guesses are its tokens up to where it left next. There the walk goes on, if the
  logits are there, or waits for the next step; or the guesses are used up, and the small model writes.

If the guess was another token, or there is none, the walk ends behind this position. `orchestrator.walk` draws the same
conclusions from what is reported, with the guesses that came meanwhile.
"""

from __future__ import annotations

from tokenrouter.errors import RouterError
from tokenrouter.messages import Decision, Outcome, ReportRow
from tokenrouter.policies import calls
from tokenrouter.subserver.runner import failed
from tokenrouter.subserver.sequence import ModelSequence


class Check:
    """See the module's text.

    Args:
        sequence: the request, with its guesses.
        first: row of the step's logits for its first undecided position.
        count: how many positions have logits.

    Attributes:
        guessed: how many guesses could be checked.
    """

    __slots__ = (
        "_decisions",
        "_end",
        "_first",
        "_last",
        "_origin",
        "_outcome",
        "_returned",
        "_tokens",
        "_values",
        "guessed",
        "sequence",
    )

    def __init__(self, sequence: ModelSequence, first: int, count: int) -> None:
        self.sequence = sequence
        self.guessed = count - 1
        self._first, self._end = first, first + count
        self._origin = sequence.position
        self._outcome = Outcome.STAY
        self._last: ReportRow | None = None
        self._tokens: list[int] = []
        self._values: list[float] = []
        self._returned: list[bool] = []
        self._decisions: list[Decision] = []

    @property
    def index(self) -> int:
        """Row of the step's logits for the next position."""
        return self._first + self.sequence.position - self._origin

    @property
    def decided(self) -> int:
        """Positions that the large model wrote."""
        return len(self._tokens)

    def take(self, row: ReportRow) -> bool:
        """A position was decided as in plain routing; whether the next one can be decided in this step."""
        sequence, leader = self.sequence, self.sequence.leader
        back = row.outcome == Outcome.LEAVE and row.target == leader and bool(row.tokens) and not row.state
        self._last, self._outcome = row, row.outcome
        self._tokens += row.tokens
        self._values += row.log_probs or []
        self._returned += [back] * len(row.tokens)
        self._decisions += row.decisions or []
        if row.outcome not in (Outcome.STAY, Outcome.LEAVE):
            return False
        if row.outcome == Outcome.LEAVE and not back:
            sequence.unfollow()
            return False
        guess = sequence.guesses.popleft() if sequence.guesses else None
        if guess is not None and guess.token != row.tokens[-1]:
            sequence.unfollow()
        if guess is None or not sequence.following:
            return False
        return self._leader_writes() if back else self.index < self._end

    def row(self) -> ReportRow:
        """What is reported: the large model's own tokens, and where the walk ended."""
        last, leaves = self._last, self._outcome == Outcome.LEAVE
        assert last is not None
        return ReportRow(
            last.request,
            last.visit,
            self._outcome,
            self._tokens,
            last.target if leaves else "",
            last.state if leaves else None,
            self._values or None,
            last.error,
            returned=self._returned,
            decisions=self._decisions or None,
        )

    def _leader_writes(self) -> bool:
        """The small model's run counts up to where it left next, where the large one is asked again."""
        sequence = self.sequence
        if outcome := sequence.take_leaders():
            self._outcome = outcome
        if outcome or not sequence.guesses:
            return False
        try:
            calls.enter(sequence, source=sequence.leader)
        except RouterError as exc:
            self._last = failed(sequence.request, sequence.visit, exc)
            self._outcome = Outcome.FAILED
            return False
        self._outcome = Outcome.STAY
        return self.index < self._end
