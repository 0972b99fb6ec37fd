"""Stationary distribution of a chain: pi = T pi with sum 1 (arXiv 2610.12242, section 3.3)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import spsolve

from tools.dtmc.chain import Chain, Matrix
from tools.dtmc.errors import NotStationary
from tools.dtmc.network import Floats

DENSE_STATES = 60  # below, a dense solve is fastest
DIRECT_STATES = 1200  # below, a sparse factorisation is; above, it fills in
SMOOTHING_STEPS = 10
DAMPING = 0.9  # below 1, so that a periodic chain converges too
TOLERANCE = 1e-9  # on the change of pi in one step, 1-norm
MAX_CYCLES = 3000
MAX_BLOCKS = 500  # above, steps differ so much in length that no drift lasts, and plain iteration is faster


def recurrent_part(chain: Chain) -> Chain:
    """The chain on its closed class; states left for good are dropped.

    The paper observes irreducibility without proof (section 3.3). Here it is checked.

    Raises:
        NotStationary: there are several closed classes, so that the long run depends on chance.
    """
    count, label = connected_components(chain.transition, directed=True, connection="strong")
    if count == 1:
        return chain
    matrix = chain.transition.tocoo()
    crosses = label[matrix.row] != label[matrix.col]
    closed = np.setdiff1d(np.arange(count), label[matrix.col[crosses]])
    if len(closed) > 1:
        raise NotStationary(
            f"the chain has {len(closed)} closed classes, so its long run depends on chance; change routing or step_ms"
        )
    return chain.restricted_to(np.flatnonzero(label == closed[0]))


def stationary_distribution(chain: Chain) -> Floats:
    """[states] pi of an irreducible chain; non-negative, sums to 1."""
    if len(chain) <= DENSE_STATES:
        return _cleaned(_dense(chain.transition))
    if len(chain) <= DIRECT_STATES:
        return _cleaned(_direct(chain.transition))
    return _cleaned(_aggregation(chain))


def _dense(transition: Matrix) -> Floats:
    system = transition.toarray() - np.eye(transition.shape[0])
    system[-1] = 1.0  # one equation is redundant; the sum takes its place
    right = np.zeros(len(system))
    right[-1] = 1.0
    solution: Floats = np.linalg.solve(system, right)
    return solution


def _direct(transition: Matrix, guess: Floats | None = None) -> Floats:
    """Fixes the value of one likely state and solves for the rest, which keeps the matrix sparse."""
    states = transition.shape[0]
    likely = int(np.argmax(transition @ np.ones(states) if guess is None else guess))
    rest = np.delete(np.arange(states), likely)
    system = (transition - sparse.eye_array(states)).tocsc()
    solution = np.ones(states)
    solution[rest] = spsolve(system[rest][:, rest], -system[rest][:, [likely]].toarray().ravel())
    return solution


def _aggregation(chain: Chain) -> Floats:
    """Iterative aggregation and disaggregation (Koury, McAllister, Stewart 1984), one block per residual vector.

    What converges slowly under plain iteration is the drift of the residuals against each other, since two models
    that are always busy keep their relative phase. Solving for the weights of the residual vectors removes just that.
    """
    transition = chain.transition
    phases, block = np.unique(chain.phase, return_inverse=True)
    blocks, states = len(phases), len(chain)
    gather = sparse.csr_array((np.ones(states), (block, np.arange(states))), shape=(blocks, states))
    gathered = gather @ transition
    pi = np.full(states, 1.0 / states)
    for _ in range(MAX_CYCLES):
        if blocks <= MAX_BLOCKS:
            pi = _rescaled(pi, block, blocks, gathered)
        for _ in range(SMOOTHING_STEPS):
            moved = transition @ pi
            change = float(np.abs(moved - pi).sum())
            pi = DAMPING * moved + (1.0 - DAMPING) * pi
        if change < TOLERANCE:
            return pi
    raise NotStationary(f"no stationary distribution within {TOLERANCE:g} after {MAX_CYCLES} cycles; raise delta_ms")


def _rescaled(pi: Floats, block: npt.NDArray[np.intp], blocks: int, gathered: Matrix) -> Floats:
    """Gives every block the weight that the chain of blocks has in the long run, as seen from `pi`."""
    weight: Floats = np.bincount(block, pi, blocks).astype(np.float64)
    safe = np.maximum(weight, 1e-200)  # a block may be all but unreachable
    inside = sparse.csr_array((pi / safe[block], (np.arange(len(pi)), block)), shape=(len(pi), blocks))
    coarse = gathered @ inside
    wanted = np.maximum(_dense(coarse) if blocks <= DENSE_STATES else _direct(coarse, weight), 0.0)
    scaled: Floats = pi * np.where(weight > 1e-200, wanted / safe, 1.0)[block]
    scaled /= scaled.sum()
    return scaled


def _cleaned(pi: Floats) -> Floats:
    """Clips what rounding made negative."""
    pi = np.maximum(pi, 0.0)
    total: float = pi.sum()
    return pi / total
