"""Counter-based random numbers: one value per (seed, position, stream), whatever the batch.

Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3"), vectorised over the batch with
numpy. A request's draws depend on nothing but its seed and the position in its response, so neither batching nor a
hand-off nor a restart of a subserver changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_TO_UNIT = 2.0**-53


class Stream(IntEnum):
    """Independent streams of one request. A policy of a user's own takes any number from `USER` on."""

    SAMPLING = 0
    ROUTING = 1
    ENTRY = 2
    USER = 16


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Ten rounds of Philox4x32.

    Args:
        counter: [4, B] uint64, each below 2**32.
        key: [2, B] uint64, each below 2**32.

    Returns:
        [4, B] uint64, each below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(10):
        if round_:
            k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
    return np.stack((c0, c1, c2, c3))


def uniform(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Sequence[int] | npt.NDArray[np.int64], stream: int
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row.

    Args:
        seeds: [B] request seeds, 64 bits unsigned.
        positions: [B] index of the token in the response, 0-based.
        stream: see `Stream`.

    Returns:
        [B] float64 with 53 random bits each.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    zeros = np.zeros_like(seed)
    counter = np.stack((position & _LOW, position >> _SHIFT, zeros + np.uint64(stream), zeros))
    words = philox4x32(counter, np.stack((seed & _LOW, seed >> _SHIFT)))
    bits = ((words[0] << _SHIFT) | words[1]) >> np.uint64(11)
    return np.multiply(bits, _TO_UNIT, dtype=np.float64)
