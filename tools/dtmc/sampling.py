"""Estimates the throughput of many threshold vectors at once, by walking the chain at random.

The walk uses the same transition rules as the exact chain, in the same order, and needs memory for the current states
only. So it ranks vectors whose exact chain is too large, and screens out the hopeless ones before any is solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.dtmc.dynamics import States, initial_state, launch, next_completion, station_thresholds
from tools.dtmc.network import Floats, Ints, Network
from tools.dtmc.scatter import Scatter

WARM_UP_EVENTS = 150  # completions before measuring starts; some 20 steps of the slowest model


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Throughput of each vector, [vectors], in tokens per second, and its standard error."""

    mean: Floats
    error: Floats


class Sampler:
    """Independent walks, `replicas` for each threshold vector; `run` continues them.

    Holds arrays of shape [S, vectors * replicas], replicas of one vector next to each other.
    """

    def __init__(
        self,
        network: Network,
        vectors: Sequence[tuple[int, ...]],
        scatters: tuple[Scatter, ...],
        replicas: int = 64,
        seed: int = 0,
    ) -> None:
        self._network, self._scatters, self._replicas = network, scatters, replicas
        self._rng = np.random.default_rng(seed)
        per_walk = np.repeat(np.array(vectors).T, replicas, axis=1)
        self._thresholds = station_thresholds(per_walk, network)
        self._states = initial_state(self._thresholds, network)
        self._committed = np.zeros(per_walk.shape[1])
        self._elapsed = np.zeros(per_walk.shape[1])
        for _ in range(WARM_UP_EVENTS):
            self._step()

    def run(self, events: int) -> None:
        """Walks every replica `events` completions further and measures."""
        for _ in range(events):
            holding, done = self._step()
            # The expected commit given the batch, as in the exact objective: less noise than the tokens drawn.
            self._committed += self._network.commit @ done
            self._elapsed += holding

    def keep(self, vectors: npt.NDArray[np.bool_]) -> None:
        """Drops the vectors whose flag is false; the others keep what they have measured."""
        walks = np.repeat(vectors, self._replicas)
        self._thresholds = self._thresholds[:, walks]
        self._states = States(*(part[:, walks] for part in self._states))
        self._committed, self._elapsed = self._committed[walks], self._elapsed[walks]

    def estimate(self) -> Estimate:
        """Ratio estimates over all events so far; the error is that of a ratio of means over replicas."""
        committed = self._committed.reshape(-1, self._replicas)
        elapsed = self._elapsed.reshape(-1, self._replicas)
        ratio = committed.sum(axis=1) / elapsed.sum(axis=1)
        spread = ((committed - ratio[:, None] * elapsed) ** 2).sum(axis=1)
        error = np.sqrt(spread / (self._replicas * (self._replicas - 1))) / elapsed.mean(axis=1)
        per_second = 1000.0 / self._network.tick_ms
        return Estimate(ratio * per_second, error * per_second)

    def _step(self) -> tuple[Ints, Ints]:
        """One completion in every walk: (holding times [walks], completed requests [S, walks])."""
        holding, done, rest = next_completion(self._states)
        waiting = rest.waiting.copy()
        for scatter, batch in zip(self._scatters, done, strict=True):
            walks = np.flatnonzero(batch)
            outcome = scatter.sample(batch[walks], self._rng.random(len(walks)))
            for target, counts in zip(scatter.targets, scatter.counts, strict=True):
                waiting[target, walks] += counts[outcome]
        self._states = launch(States(waiting, rest.running, rest.residual), self._thresholds, self._network)
        return holding, done
