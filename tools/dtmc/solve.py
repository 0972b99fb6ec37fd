"""Throughput and per-model measures of one threshold vector (arXiv 2610.12242, section 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tools.dtmc.chain import DEFAULT_MAX_TRANSITIONS, Chain, build_chain
from tools.dtmc.network import Floats, Network, build_network
from tools.dtmc.profile import Profile
from tools.dtmc.scatter import Scatter, scatter_tables
from tools.dtmc.stationary import recurrent_part, stationary_distribution


@dataclass(frozen=True, slots=True)
class Solution:
    """What one threshold vector gives in the long run; dicts are by model name.

    Attributes:
        tokens_per_second: committed tokens, all requests together.
        mean_tpot_ms: mean time per output token of one request, N / throughput (Little's law).
        states: states of the chain that recur.
        mean_batch: requests per step.
        utilisation: share of time that the model is busy.
        mean_wait_ms: time from ready to the start of the step, per request and step; hand-off delay not included.
    """

    tokens_per_second: float
    mean_tpot_ms: float
    states: int
    mean_batch: dict[str, float]
    utilisation: dict[str, float]
    mean_wait_ms: dict[str, float]


@dataclass(frozen=True)
class Solver:
    """Solves threshold vectors of one network; keeps what they share."""

    network: Network
    max_transitions: int = DEFAULT_MAX_TRANSITIONS

    @cached_property
    def scatters(self) -> tuple[Scatter, ...]:
        return scatter_tables(self.network)

    def stationary(self, thresholds: tuple[int, ...]) -> tuple[Chain, Floats]:
        chain = recurrent_part(build_chain(self.network, thresholds, self.scatters, self.max_transitions))
        return chain, stationary_distribution(chain)

    def tokens_per_second(self, thresholds: tuple[int, ...]) -> float:
        chain, pi = self.stationary(thresholds)
        return throughput(self.network, chain, pi)

    def solve(self, thresholds: tuple[int, ...]) -> Solution:
        """Everything that is reported; `thresholds` must be feasible."""
        chain, pi = self.stationary(thresholds)
        rate = throughput(self.network, chain, pi)
        weight = pi * chain.holding
        period: float = weight.sum()  # mean ticks between completions
        done = chain.done @ pi
        steps = (chain.done > 0) @ pi
        waiting, busy = chain.states.waiting @ weight, (chain.states.running > 0) @ weight
        zeros = np.zeros(self.network.stations)
        return Solution(
            tokens_per_second=rate,
            mean_tpot_ms=1000.0 * self.network.inflight / rate,
            states=len(chain),
            mean_batch=self._by_model(np.divide(done, steps, out=zeros.copy(), where=steps > 0)),
            utilisation=self._by_model(busy / period),
            mean_wait_ms=self._by_model(
                np.divide(waiting, done, out=zeros.copy(), where=done > 0) * self.network.tick_ms
            ),
        )

    def _by_model(self, values: Floats) -> dict[str, float]:
        return {name: float(value) for name, value in zip(self.network.names, values, strict=False)}


def throughput(network: Network, chain: Chain, pi: Floats) -> float:
    """T(B) = E[committed tokens] / E[holding time], in tokens per second (section 3.4)."""
    committed = float(network.commit @ (chain.done @ pi))
    return 1000.0 * committed / (float(chain.holding @ pi) * network.tick_ms)


def solve(
    profile: Profile, inflight: int, thresholds: Mapping[str, int], max_transitions: int = DEFAULT_MAX_TRANSITIONS
) -> Solution:
    """Solves the chain of one threshold vector exactly.

    Raises:
        ThresholdError: unknown model, out of range, or not deadlock-free.
        TooLarge: the chain has more than `max_transitions` transitions.
    """
    network = build_network(profile, inflight)
    return Solver(network, max_transitions).solve(network.threshold_vector(thresholds))
