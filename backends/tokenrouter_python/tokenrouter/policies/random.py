"""Random baseline: each token is written by the large model with probability p, independently.

The form of R2R's `random` strategy (thu-nics/R2R, r2r/utils/switching.py): on the small model u = uniform[0, 1), large
iff u < p; the small model's token is discarded, the large model writes exactly one. R2R draws from one generator shared
by the batch; here the draw is keyed by (seed, position), so it depends on nothing else. p = 0 and p = 1 are the
small-only and large-only outputs.
"""

from __future__ import annotations

from tokenrouter.errors import InvalidRequest
from tokenrouter.policies.base import Destinations, Handoff, Policy, PolicyParams, RouteBatch, Row, Visit
from tokenrouter.rng import Stream, uniform


class Random(Policy):
    """Leaves the small model for one token where a draw falls below `p`."""

    name = "random"
    two_models = True

    class Params(PolicyParams):
        """Knobs of `Random`. `p`: expected share of tokens by the large model, in [0, 1]."""

        p: float = 0.5

    def check(self) -> None:
        """Refuses probabilities outside [0, 1]; NaN is outside."""
        if not 0.0 <= self.params.p <= 1.0:
            raise InvalidRequest(f"policy_params.p is {self.params.p}; it lies in [0, 1]")

    def receive(self, row: Row) -> Visit:
        """One token at the large model."""
        return Visit(limit=1, then=self.models[0]) if row.model == self.models[1] else Visit()

    def route(self, batch: RouteBatch) -> Destinations:
        """[B] bool."""
        leaves: Destinations = uniform(batch.seeds, batch.positions, Stream.ROUTING) < self.params.p
        return leaves

    def send(self, row: Row, target: str) -> Handoff:
        """The small model's token is discarded."""
        return Handoff(keep_token=False)
