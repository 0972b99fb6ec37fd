"""Where the requests of a completed batch go: a multinomial over the station's row of P (section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

from tools.dtmc.network import Floats, Ints, Network


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Outcomes of one station for every batch size 0..N, one after the other.

    Attributes:
        targets: [K] stations with positive probability.
        counts: [K, outcomes] requests that each target gets.
        probability: [outcomes] probability given the batch size.
        first: [N+2] index of the first outcome of each batch size.
        ends: [outcomes] batch size plus cumulative probability, increasing, for sampling.
    """

    targets: Ints
    counts: Ints
    probability: Floats
    first: Ints
    ends: Floats

    def sample(self, done: Ints, uniform: Floats) -> Ints:
        """Index of one outcome per batch size in `done`, by inversion of `uniform` in [0, 1)."""
        return np.searchsorted(self.ends, done + uniform, side="right")

    def expand(self, done: Ints) -> tuple[Ints, Ints]:
        """All outcomes of every batch size in `done`: (position in `done`, outcome index), in order."""
        counts = self.first[done + 1] - self.first[done]
        position = np.repeat(np.arange(len(done)), counts)
        before = np.cumsum(counts) - counts
        return position, np.arange(len(position)) + (self.first[done] - before)[position]


def scatter_tables(network: Network) -> tuple[Scatter, ...]:
    return tuple(scatter_table(row, network.inflight) for row in network.routing)


def scatter_table(row: Floats, largest: int) -> Scatter:
    """Of a station with this row of P, for batches of up to `largest`."""
    targets = np.flatnonzero(row > 0)
    by_batch = [_compositions(batch, len(targets)) for batch in range(largest + 1)]
    sizes = np.array([block.shape[1] for block in by_batch])
    batch = np.repeat(np.arange(largest + 1), sizes)
    counts = np.hstack(by_batch)
    log_p = gammaln(batch + 1) - gammaln(counts + 1).sum(axis=0) + np.log(row[targets]) @ counts
    first = np.concatenate([[0], np.cumsum(sizes)])
    probability = np.exp(log_p)
    probability /= np.add.reduceat(probability, first[:-1])[batch]  # rounding of gammaln
    cumulative = np.cumsum(probability)
    ends = batch + np.minimum(cumulative - (cumulative[first[:-1]] - probability[first[:-1]])[batch], 1.0)
    ends[first[1:] - 1] = np.arange(largest + 1) + 1.0
    return Scatter(targets, counts, probability, first, ends)


def _compositions(total: int, parts: int) -> Ints:
    """[parts, number] all ways to write `total` as an ordered sum of `parts` terms of 0 or more."""
    if parts == 1:
        return np.array([[total]])
    blocks = []
    for head in range(total + 1):
        tail = _compositions(total - head, parts - 1)
        blocks.append(np.vstack([np.full((1, tail.shape[1]), head), tail]))
    return np.hstack(blocks)
