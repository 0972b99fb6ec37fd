"""Random baseline: each token is written by the large model with probability p, independently.

The form of R2R's `random` strategy (thu-nics/R2R, r2r/utils/switching.py): on the small model u = uniform[0, 1), large
iff u < p; the small model's token is discarded, the large model writes exactly one. R2R draws from one generator shared
by the batch; here the draw is keyed by (seed, position), so it depends on nothing else. p = 0 and p = 1 are the
small-only and large-only outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, PolicyParams, RouteBatch
from tokenrouter.policies.explaining import measured
from tokenrouter.policies.one_token import OneToken, check_unit
from tokenrouter.rng import Stream, draw, uniform


class Random(OneToken):
    """Leaves the small model for one token where a draw falls below `p`."""

    name = "random"

    class Params(PolicyParams):
        """Knobs of `Random`. `p`: expected share of tokens by the large model, in [0, 1]."""

        p: float = 0.5

    def check(self) -> None:
        """Refuses probabilities outside [0, 1]; NaN is outside."""
        check_unit("p", self.params.p)

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """The draw, at the small model."""
        if batch.model != self.models[0]:
            return super().explain(batch)
        return measured("u", uniform(batch.seeds, batch.positions, Stream.ROUTING), "<", self.params.p)

    def leaves(self, batch: RouteBatch) -> Destinations:
        """[B] bool."""
        return [draw(row.seed, row.position, Stream.ROUTING) < self.params.p for row in batch.rows]
