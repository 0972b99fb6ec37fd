"""A request's last positions in its state, for networks that take several: bytes of float32, oldest first.

The state's value is replaced with every position and never changed, so a copy of the dictionary can be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenrouter.policies.base import Row

if TYPE_CHECKING:
    from torch import Tensor

_KEY = "window"


def windows(rows: Sequence[Row], current: Tensor, length: int) -> tuple[Tensor, list[bool]]:
    """This position's features behind those of the positions before it.

    Args:
        rows: [B] the requests.
        current: [B, F] float32.
        length: W, positions in a window.

    Returns:
        [B, W, F] on the device of `current`, zeros where a request has no such position yet; [B] whether it has all.
    """
    past: npt.NDArray[np.float32] = np.zeros((len(rows), length - 1, current.shape[1]), dtype=np.float32)
    full = []
    for i, row in enumerate(rows):
        kept: list[bytes] = row.state.get(_KEY, [])
        full.append(len(kept) == length - 1)
        for j, position in enumerate(reversed(kept), start=1):
            past[i, -j] = np.frombuffer(position, dtype=np.float32)
    found = current.new_empty((len(rows), length, current.shape[1]))
    found[:, :-1] = current.new_tensor(past)
    found[:, -1] = current
    return found, full


def remember(rows: Sequence[Row], current: npt.NDArray[Any], length: int) -> None:
    """Adds this position's features [B, F] float32 to the requests' states."""
    for row, features in zip(rows, current, strict=True):
        row.state[_KEY] = [*row.state.get(_KEY, []), features.tobytes()][-(length - 1) :]
