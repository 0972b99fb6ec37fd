"""The exact chain: every reachable state, and the sparse transition matrix (arXiv 2610.12242, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from tools.dtmc.codec import Codec
from tools.dtmc.dynamics import States, initial_state, launch, next_completion, station_thresholds
from tools.dtmc.errors import TooLarge
from tools.dtmc.network import Floats, Ints, Network
from tools.dtmc.scatter import Scatter

Matrix = Any  # scipy.sparse.csr_array; scipy ships no type hints

DEFAULT_MAX_TRANSITIONS = 8_000_000  # about 0.8 GB while the matrix is assembled


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A Markov chain over the states reachable from "all requests wait at the entry".

    Attributes:
        transition: [states, states] sparse; entry (t, s) is the probability of s -> t, so columns sum to 1.
        states: arrays [S, states].
        holding: [states] ticks until the next completion.
        done: [S, states] requests that complete then.
        phase: [states] number of the residual vector of each state.
    """

    transition: Matrix
    states: States
    holding: Ints
    done: Ints
    phase: Ints

    def __len__(self) -> int:
        return len(self.holding)

    def restricted_to(self, keep: Ints) -> Chain:
        """The chain on a closed subset of its states."""
        states = States(*(part[:, keep] for part in self.states))
        inside = self.transition[keep][:, keep]
        return Chain(inside, states, self.holding[keep], self.done[:, keep], self.phase[keep])


def build_chain(
    network: Network,
    thresholds: tuple[int, ...],
    scatters: tuple[Scatter, ...],
    max_transitions: int = DEFAULT_MAX_TRANSITIONS,
) -> Chain:
    """Enumerates the reachable states, breadth first and a whole frontier at a time.

    Args:
        max_transitions: limit on memory; beyond it `TooLarge` is raised.
    """
    codec = Codec.of(network)
    limits = station_thresholds(np.array(thresholds)[:, None], network)
    frontier = codec.encode(initial_state(limits, network))
    known = frontier
    sources: list[Ints] = []
    targets: list[Ints] = []
    weights: list[Floats] = []
    total = 0
    while len(frontier):
        found = _successors(codec.decode(frontier), scatters, max_transitions - total)
        if found is None:
            raise TooLarge(
                f"the exact chain has more than {max_transitions:,} transitions; raise --max-transitions or delta_ms "
                "(search samples such chains)"
            )
        source, after, weight = found
        target = codec.encode(launch(after, limits, network))
        sources.append(frontier[source])
        targets.append(target)
        weights.append(weight)
        total += len(target)
        frontier = _not_in(known, np.unique(target))
        known = np.insert(known, np.searchsorted(known, frontier), frontier)
    transition = _matrix(known, sources, targets, weights)
    states = codec.decode(known)
    completion = next_completion(states)
    return Chain(transition, states, completion.holding, completion.done, known % codec.phases)


def _successors(states: States, scatters: tuple[Scatter, ...], limit: int) -> tuple[Ints, States, Floats] | None:
    """All outcomes of the next completion of each state: (source row, state before launches, probability).

    None if there are more than `limit`.
    """
    _, done, rest = next_completion(states)
    source = np.arange(done.shape[1])
    waiting, weight = rest.waiting, np.ones(len(source))
    for scatter, batch in zip(scatters, done, strict=True):
        if not batch.any():
            continue
        position, outcome = scatter.expand(batch[source])
        if len(position) > limit:
            return None
        source, weight = source[position], weight[position] * scatter.probability[outcome]
        waiting = waiting[:, position]
        waiting[scatter.targets] += scatter.counts[:, outcome]
    return source, States(waiting, rest.running[:, source], rest.residual[:, source]), weight


def _not_in(known: Ints, candidates: Ints) -> Ints:
    """Those of sorted `candidates` that are not in sorted `known`."""
    place = np.minimum(np.searchsorted(known, candidates), len(known) - 1)
    new: Ints = candidates[known[place] != candidates]
    return new


def _matrix(known: Ints, sources: list[Ints], targets: list[Ints], weights: list[Floats]) -> Matrix:
    """Assembles the matrix; 32-bit indices, since it is memory that limits the size of a chain."""
    rows = np.concatenate([np.searchsorted(known, part).astype(np.int32) for part in targets])
    columns = np.concatenate([np.searchsorted(known, part).astype(np.int32) for part in sources])
    return sparse.csr_array((np.concatenate(weights), (rows, columns)), shape=(len(known),) * 2)
