"""The rules of one transition (arXiv 2610.12242, section 3.3), on many states at once.

A block of states is three integer arrays of shape [S, rows]: `waiting` (k_i), `running` (b_i) and `residual` (r_i, in
ticks, 0 when idle), each observed just after a completion and the launches that follow it. One transition is
`next_completion`, then the scatter of the completed requests (`scatter.py`), then `launch`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tools.dtmc.network import Ints, Network

NEVER = np.iinfo(np.int64).max


class States(NamedTuple):
    """A block of states; each array has shape [S, rows]."""

    waiting: Ints
    running: Ints
    residual: Ints


class Completion(NamedTuple):
    """What happens next in each state.

    Attributes:
        holding: [rows] tau, ticks until it happens: the smallest residual of a busy station.
        done: [S, rows] requests that complete; all stations whose residual is tau complete together.
        rest: the states at that moment, before the completed requests arrive anywhere.
    """

    holding: Ints
    done: Ints
    rest: States


def next_completion(states: States) -> Completion:
    """Advances every state to its next completion. At least one station must be busy in each."""
    waiting, running, residual = states
    holding = np.where(running > 0, residual, NEVER).min(axis=0)
    done = np.where(residual == holding, running, 0)
    rest = np.maximum(residual - holding, 0)
    return Completion(holding, done, States(waiting, running - done, rest))


def launch(states: States, thresholds: npt.NDArray[np.int64], network: Network) -> States:
    """Starts every idle station that has its threshold: it takes all that wait, up to its maximum batch.

    Args:
        thresholds: [S, 1], or [S, rows] for one vector per state.
    """
    waiting, running, residual = states
    starts = (running == 0) & (waiting >= thresholds)
    size = np.where(starts, np.minimum(waiting, network.max_batch[:, None]), 0)
    ticks = np.take_along_axis(network.ticks, size, axis=1)  # 0 where nothing starts
    return States(waiting - size, running + size, residual + ticks)


def initial_state(thresholds: npt.NDArray[np.int64], network: Network) -> States:
    """One state per column of `thresholds`: every request waits at the entry, then launches."""
    waiting = np.zeros_like(thresholds)
    waiting[network.entry] = network.inflight
    return launch(States(waiting, np.zeros_like(waiting), np.zeros_like(waiting)), thresholds, network)


def station_thresholds(vectors: npt.NDArray[np.int64], network: Network) -> Ints:
    """[S, rows] from [M, rows]: links start at once."""
    links = np.ones((network.stations - network.models, vectors.shape[1]), dtype=np.int64)
    return np.vstack([vectors.astype(np.int64), links])
