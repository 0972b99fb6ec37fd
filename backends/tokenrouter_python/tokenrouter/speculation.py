"""Speculative hand-off: the small model goes on from its own token while the large one decides. Settings and agreement.

The walk itself is in `subserver.check` (the large model's side) and `orchestrator.walk` (what it means for a response).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

DEFAULT_DEPTH = 8
# Until so many tokens were compared nothing is known; from then on older ones count less and less.
_LEAST_COMPARED = 64
_MEMORY = 512


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a small model may go ahead of the large one; no setting of this changes a token.

    Attributes:
        depth: most guesses per request that are not checked yet.
        least_agreement: below this share of guesses that the large model writes too, in [0, 1], requests wait for it as
            in plain routing. A moving average per policy, over all requests, those that waited included.
    """

    depth: int = DEFAULT_DEPTH
    least_agreement: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what makes no sense; NaN is outside of every interval."""
        if self.depth < 1:
            raise ValueError(f"speculation.depth is {self.depth}; it is at least 1 (leave speculation out for none)")
        if not 0.0 <= self.least_agreement <= 1.0:
            raise ValueError(f"speculation.least_agreement is {self.least_agreement:g}; it lies in [0, 1]")


@dataclass(slots=True)
class Agreement:
    """What became of one policy's guesses; counters only grow.

    Attributes:
        compared: tokens that the small model discarded at a hand-off and the large one's were compared with, in plain
            routing too; `agreed` of them were equal.
        confirmed: guesses that became part of a response, whoever counts as their writer.
        rolled_back: guesses that did not.
        mean: moving average of agreed / compared.
    """

    compared: int = 0
    agreed: int = 0
    confirmed: int = 0
    rolled_back: int = 0
    mean: float = 1.0

    def observe(self, agreed: bool) -> None:
        """One more token was compared."""
        self.compared += 1
        self.agreed += agreed
        self.mean += (agreed - self.mean) / min(self.compared, _MEMORY)

    def suffices(self, least: float) -> bool:
        """Whether going ahead is worth it, as far as is known."""
        return self.compared < _LEAST_COMPARED or self.mean >= least
