"""ME, the mixture-model-like ensemble (arXiv 2605.00419): before every token a draw by weight decides who writes it.

The draw ignores the context; only the drawn model runs, and its token is always kept. With temperature 1 and no filters
this samples exactly from the weighted mean of the models' distributions; with other settings they act on the drawn
model's distribution, and greedy decoding is a random model's argmax. Source: Kamichanw/Mixture-model-like-Ensemble,
src/ray_engine.py, configs/default.yaml (n >= 2 models, weights normalised).

The source draws from one generator per engine. Here the writer of position i is a function of (seed, i) alone, the
first position included (`entry`), so neither batching nor hand-offs change it, and a visit's length is known ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, EntryRequest, Policy, PolicyParams, RouteBatch, Row, Visit
from tokenrouter.policies.explaining import measured
from tokenrouter.rng import Stream, draw, uniform

# How far `receive` looks ahead; beyond that `route` decides token by token, with the same draws.
_LOOKAHEAD = 256


class ME(Policy):
    """Any number of models; each position's writer is drawn by weight."""

    name = "me"

    class Params(PolicyParams):
        """Knobs of `ME`. `weights`: by model name, or in the deployment's order; any scale; by default all equal."""

        weights: dict[str, float] | tuple[float, ...] | None = None

    def check(self) -> None:
        """Resolves the weights."""
        if len(self.models) < 2:
            raise ConfigError(f"policy 'me' draws between models; this deployment has only {self.models[0]}")
        weights = self._weights()
        if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights) or not sum(weights) > 0.0:
            raise InvalidRequest(f"policy_params.weights is {weights}; finite, not negative, and not all zero")
        self._positive = tuple(name for name, weight in zip(self.models, weights, strict=True) if weight > 0.0)
        cumulative = np.cumsum(weights) / sum(weights)
        # Where the sum rounds below 1, the last model with a weight takes the rest.
        cumulative[int(np.flatnonzero(weights)[-1]) :] = 1.0
        self._cumulative = cumulative

    def _weights(self) -> tuple[float, ...]:
        """One weight per model of the deployment."""
        given: Mapping[str, float] | tuple[float, ...] | None = self.params.weights
        if given is None:
            return (1.0,) * len(self.models)
        if isinstance(given, Mapping):
            if unknown := sorted(given.keys() - set(self.models)):
                raise InvalidRequest(f"policy_params.weights names {unknown[0]!r}; known: {', '.join(self.models)}")
            return tuple(given.get(name, 0.0) for name in self.models)
        if len(given) != len(self.models):
            raise InvalidRequest(
                f"policy_params.weights has {len(given)} entries; the models are {', '.join(self.models)}"
            )
        return given

    def visited(self) -> tuple[str, ...]:
        """Models with a weight above 0."""
        return self._positive

    def entry(self, request: EntryRequest) -> str:
        """The writer of the first token, drawn like every other one."""
        return self._writer(request.seed, 0)

    def receive(self, row: Row) -> Visit:
        """The run of consecutive positions that this model writes, and who follows."""
        for ahead in range(1, _LOOKAHEAD + 1):
            writer = self._writer(row.seed, row.position + ahead)
            if writer != row.model:
                return Visit(limit=ahead, then=writer)
        return Visit()

    def route(self, batch: RouteBatch) -> Destinations:
        """[B] int64: index of the writer of the next position."""
        return self._index(self._draws(batch))

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """The draw for the next position, below the bound of the model that is drawn."""
        u = self._draws(batch)
        return measured("u", u, "<", self._cumulative[self._index(u)])

    def explain_entry(self, request: EntryRequest) -> Sequence[Measure]:
        """The draw for the first position."""
        u = draw(request.seed, 0, Stream.ROUTING)
        return measured("u", [u], "<", [float(self._cumulative[self._index(np.array([u]))[0]])])[0]

    def _draws(self, batch: RouteBatch) -> npt.NDArray[np.float64]:
        """[B] uniform in [0, 1), of the next positions."""
        return uniform(batch.seeds, [position + 1 for position in batch.positions], Stream.ROUTING)

    def _writer(self, seed: int, position: int) -> str:
        return self.models[int(self._index(np.array([draw(seed, position, Stream.ROUTING)]))[0])]

    def _index(self, u: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """[B] index of the first model whose cumulative weight exceeds u in [0, 1); a weight of 0 is never drawn."""
        return np.searchsorted(self._cumulative, u, side="right")
