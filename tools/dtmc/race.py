"""Which threshold vectors may be best, judged by sampling: hopeless ones leave early, close ones are sampled longer.

A vector leaves when its estimate plus `SIGMAS` standard errors is below the best estimate minus `SIGMAS` of its own
standard errors, or below an exactly known throughput. The two margins together are at least 4 standard errors of the
difference, and 5.7 when the two are equal, so the true best leaves with a probability well below 1e-3 per search.
The seed is fixed: the same input gives the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tools.dtmc.network import Floats, Network
from tools.dtmc.sampling import Estimate, Sampler
from tools.dtmc.scatter import Scatter
from tools.progress import Report, silent

SIGMAS = 4.0
REPLICAS = 64
BLOCK = 4000  # vectors screened together; bounds memory to some 300 MB
SCREEN_EVENTS = 50
FIRST_ROUND = 100  # completions; each round has as many as all before it together
FEW = 12  # vectors that are not worth another round when an exact solution is at hand
MAX_EVENTS = 60_000

Vector = tuple[int, ...]


class Race:
    """The vectors still in question, and their estimates."""

    def __init__(self, network: Network, scatters: tuple[Scatter, ...], vectors: Sequence[Vector], report: Report):
        self._network, self._scatters, self._report = network, scatters, report
        self._floor = 0.0  # a throughput that is reached for certain, or for all practical purposes
        self.vectors = self._screened(list(vectors))
        self._sampler = Sampler(network, self.vectors, scatters, REPLICAS, seed=1)
        self._events = 0
        self.estimate = Estimate(np.zeros(0), np.zeros(0))

    def run(self, relative_error: float, stop_at: int = 1) -> None:
        """Samples until every error is below `relative_error`, or at most `stop_at` vectors are left."""
        while True:
            events = max(FIRST_ROUND, self._events)
            for done in range(events):
                self._sampler.run(1)
                if done % 50 == 0:
                    self._report(f"sampling {len(self.vectors)} vectors", done / events)
            self._events += events
            self._prune(self._sampler.estimate())
            worst = float((self.estimate.error / self.estimate.mean).max(initial=0.0))
            if len(self.vectors) <= stop_at or worst <= relative_error or self._events >= MAX_EVENTS:
                return

    def leader(self) -> tuple[Vector, float]:
        """The vector with the highest estimate, and that estimate; 0 if no vector is left."""
        if not self.vectors:
            return (), 0.0
        first = int(np.argmax(self.estimate.mean))
        return self.vectors[first], float(self.estimate.mean[first])

    def settle(self, vectors: Collection[Vector], throughput: float) -> None:
        """Takes out `vectors`, which have been solved exactly, and those that cannot beat `throughput`."""
        self._floor = max(self._floor, throughput)
        hopeful = self.estimate.mean + SIGMAS * self.estimate.error >= self._floor
        self._keep(hopeful & np.array([vector not in vectors for vector in self.vectors], dtype=bool))

    def _screened(self, vectors: list[Vector]) -> list[Vector]:
        """A short run of everything, in blocks."""
        means: list[Floats] = []
        errors: list[Floats] = []
        for start in range(0, len(vectors), BLOCK):
            self._report(f"screening {len(vectors)} vectors", start / len(vectors))
            sampler = Sampler(self._network, vectors[start : start + BLOCK], self._scatters, REPLICAS, seed=0)
            sampler.run(SCREEN_EVENTS)
            means.append(sampler.estimate().mean)
            errors.append(sampler.estimate().error)
        mean, error = np.concatenate(means), np.concatenate(errors)
        hopeful = mean + SIGMAS * error >= (mean - SIGMAS * error).max()
        return [vectors[i] for i in np.flatnonzero(hopeful)]

    def _prune(self, estimate: Estimate) -> None:
        self.estimate = estimate
        reached = float((estimate.mean - SIGMAS * estimate.error).max())
        self._floor = max(self._floor, reached)
        self._keep(estimate.mean + SIGMAS * estimate.error >= self._floor)

    def _keep(self, flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        self._sampler.keep(flags)
        self.vectors = [vector for vector, flag in zip(self.vectors, flags, strict=True) if flag]
        self.estimate = Estimate(self.estimate.mean[flags], self.estimate.error[flags])


def sampled_throughput(
    network: Network, scatters: tuple[Scatter, ...], vector: Vector, relative_error: float, report: Report = silent
) -> tuple[float, float]:
    """An estimate for one vector, independent of any race: (tokens per second, standard error)."""
    sampler = Sampler(network, [vector], scatters, replicas=8 * REPLICAS, seed=2)
    for events in range(FIRST_ROUND, MAX_EVENTS, FIRST_ROUND):
        sampler.run(FIRST_ROUND)
        estimate = sampler.estimate()
        mean, error = float(estimate.mean[0]), float(estimate.error[0])
        report("sampling one vector", min(1.0, (relative_error * mean / max(error, 1e-300)) ** 2))
        if error <= relative_error * mean and events >= 10 * FIRST_ROUND:
            break
    return mean, error
