"""Counter-based random numbers: one value per (seed, position, stream), whatever the batch.

A request's draws depend on nothing but its seed and the position in its response, so neither batching nor a hand-off
nor a restart of a subserver changes them. BLAKE2b is the counter-based generator: about 1 microsecond a draw, less
than building one of numpy's bit generators for a single number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_KEY = struct.Struct("<QQQ")
_TO_UNIT = 2.0**-53


class Stream(IntEnum):
    """Independent streams of one request. A policy of a user's own takes any number in `USER` .. `MODEL` - 1.

    From `MODEL` on there is one stream per model: `MODEL` + index of the model in the deployment.
    """

    SAMPLING = 0
    ROUTING = 1
    ENTRY = 2
    USER = 16
    MODEL = 1 << 32


def draw(seed: int, position: int, stream: int) -> float:
    """One number in [0, 1) with 53 random bits."""
    digest = blake2b(_KEY.pack(seed, position, stream), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * _TO_UNIT


def uniform(seeds: Iterable[int], positions: Iterable[int], stream: int) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row.

    Args:
        seeds: [B] request seeds, 64 bits unsigned.
        positions: [B] index of the token in the response, 0-based.
        stream: see `Stream`.

    Returns:
        [B] float64.
    """
    return np.array(
        [draw(seed, position, stream) for seed, position in zip(seeds, positions, strict=True)], dtype=np.float64
    )
