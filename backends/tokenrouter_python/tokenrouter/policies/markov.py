"""Routes by a given matrix of probabilities, whatever the models say: for scheduling studies and the emulated engine.

The process of arXiv 2610.12242, section 3: after a step of model i a request goes to model j with probability p_ij and
commits c_ij (0 or 1) tokens on that move. The draw is keyed by (seed, position), in a stream of its own per model, so
decisions depend neither on batching nor on thresholds. No model is asked twice about one position, because no cycle of
moves that commit nothing is accepted; so all draws of a request are independent and it follows the matrix exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate
from typing import Literal

import msgspec

from tokenrouter.errors import InvalidRequest
from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, EntryRequest, Handoff, Policy, PolicyParams, RouteBatch, Row
from tokenrouter.policies.explaining import measured
from tokenrouter.rng import Stream, draw

# Probabilities are often printed with six digits.
_SUM_TOLERANCE = 1e-6


class Markov(Policy):
    """A request walks over the models by a transition matrix; any number of models."""

    name = "markov"

    class Params(PolicyParams):
        """Knobs of `Markov`; models by name.

        Attributes:
            routing: from -> to -> probability; what is left out is 0. A row per model that can be reached.
            commit: from -> to -> whether the token just sampled is kept on that move. Staying keeps it (1), leaving
                discards it (0), unless it says otherwise; staying with 0 is refused.
            entry: model that writes first; "" is the deployment's first.
        """

        routing: dict[str, dict[str, float]]
        commit: dict[str, dict[str, Literal[0, 1]]] = msgspec.field(default_factory=dict)
        entry: str = ""

    def check(self) -> None:
        """Refuses unknown models, rows that do not sum to 1, and cycles that commit nothing."""
        self._check_names()
        self._entry = self.params.entry or self.models[0]
        self._cumulative = {name: self._resolved(name, row) for name, row in self.params.routing.items()}
        self._visited = self._reached()
        self._check_progress()

    def _check_names(self) -> None:
        matrices: dict[str, Mapping[str, Mapping[str, object]]] = {
            "routing": self.params.routing,
            "commit": self.params.commit,
        }
        named = [("entry", self.params.entry or self.models[0])]
        for field, matrix in matrices.items():
            named += [(field, name) for row, columns in matrix.items() for name in (row, *columns)]
        for field, name in named:
            if name not in self.models:
                raise InvalidRequest(f"policy_params.{field} names {name!r}; known: {', '.join(self.models)}")

    def _resolved(self, name: str, row: Mapping[str, float]) -> list[float]:
        """[M] cumulative probabilities of a row."""
        p = [row.get(target, 0.0) for target in self.models]
        if not all(math.isfinite(value) and value >= 0.0 for value in p):
            raise InvalidRequest(f"policy_params.routing.{name} is {row}; probabilities are finite and not negative")
        total = math.fsum(p)
        if abs(total - 1.0) > _SUM_TOLERANCE:
            raise InvalidRequest(f"policy_params.routing.{name} sums to {total:.6g}; it has to sum to 1")
        # Where the sum rounds below 1, the last model with a probability takes the rest.
        last = max(i for i, value in enumerate(p) if value)
        return [value / total if i < last else 1.0 for i, value in enumerate(accumulate(p))]

    def _reached(self) -> tuple[str, ...]:
        """Models that can be reached from the entry, in the deployment's order."""
        reached, todo = {self._entry}, [self._entry]
        while todo:
            name = todo.pop()
            if name not in self.params.routing:
                raise InvalidRequest(f"policy_params.routing has no row for {name!r}, which requests can reach")
            new = {target for target, p in self.params.routing[name].items() if p > 0.0} - reached
            reached |= new
            todo += new
        return tuple(name for name in self.models if name in reached)

    def _commits(self, model: str, target: str) -> bool:
        default = 1 if model == target else 0
        return bool(self.params.commit.get(model, {}).get(target, default))

    def _check_progress(self) -> None:
        """Takes away models without a silent move to, or from, one that is left; what remains are cycles."""
        left = set(self._visited)
        while gone := {name for name in left if not self._silent_within(name, left)}:
            left -= gone
        if left:
            names = ", ".join(name for name in self.models if name in left)
            raise InvalidRequest(
                f"policy_params.commit: a request can circle without committing a token ({names}); "
                "set 1 on a move of every cycle, and on every move that stays"
            )

    def _silent_within(self, name: str, names: Set[str]) -> bool:
        return any(self._silent(name, other) for other in names) and any(self._silent(other, name) for other in names)

    def _silent(self, model: str, target: str) -> bool:
        return self.params.routing[model].get(target, 0.0) > 0.0 and not self._commits(model, target)

    def visited(self) -> tuple[str, ...]:
        """Models that can be reached from the entry."""
        return self._visited

    def entry(self, request: EntryRequest) -> str:
        """The parameter."""
        return self._entry

    def speculates(self) -> bool:
        """If the first model discards where it leaves, and the second keeps."""
        if len(self.models) != 2:
            return False
        small, large = self.models
        return not self._commits(small, large) and self._commits(large, small)

    def route(self, batch: RouteBatch) -> Destinations:
        """[B] index of the next model."""
        cumulative = self._cumulative[batch.model]
        return [bisect_right(cumulative, u) for u in self._draws(batch)]

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """The draw, below the bound of the model that is drawn."""
        u, cumulative = self._draws(batch), self._cumulative[batch.model]
        return measured("u", u, "<", [cumulative[bisect_right(cumulative, each)] for each in u])

    def _draws(self, batch: RouteBatch) -> list[float]:
        """[B] uniform in [0, 1)."""
        stream = Stream.MODEL + self.models.index(batch.model)
        return [draw(row.seed, row.position, stream) for row in batch.rows]

    def send(self, row: Row, target: str) -> Handoff:
        """Keeps or discards as the matrix says."""
        return Handoff(keep_token=self._commits(row.model, target))
