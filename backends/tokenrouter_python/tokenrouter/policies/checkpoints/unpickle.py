"""Reads files that torch.save wrote without ever executing what they contain.

`torch.load(weights_only=True)` builds plain containers, numbers, text, tensors and torch dtypes, and nothing else.
Numpy scalars, which training code tends to leave in such files, are read too, by stand-ins of ours instead of numpy's
own reconstruction functions.
"""

from __future__ import annotations

import pickle
import re
import struct
from pathlib import Path
from typing import Any

import torch

from tokenrouter.errors import ConfigError

# Type code of numpy -> format of struct.
_NUMBERS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u1": "B", "b1": "?"}


class _NumpyDtype:
    """Stands for `numpy.dtype`: remembers the type code."""

    def __init__(self, code: str, *_: object) -> None:
        self.code = code
        self.order = "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _numpy_scalar(dtype: _NumpyDtype, data: bytes) -> float | int | bool:
    """Stands for `numpy.core.multiarray.scalar`: the plain Python number."""
    value: float | int | bool = struct.unpack(dtype.order + _NUMBERS[dtype.code], data)[0]
    return value


_STAND_INS: list[Any] = [
    (_NumpyDtype, "numpy.dtype"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
]


def load_plain(path: Path) -> Any:
    """Contents of a file that torch.save wrote, on the CPU.

    Raises:
        ConfigError: unreadable, or it holds anything but plain data; nothing of it was executed.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise ConfigError(
            f"{path} is refused: {_reason(exc)}. Router files hold tensors, numbers and text only; nothing in it was "
            "executed"
        ) from exc
    except Exception as exc:
        raise ConfigError(f"{path} cannot be read as a file of torch.save: {type(exc).__name__}: {exc}") from exc


def _reason(exc: Exception) -> str:
    """The offending name out of torch's long advice."""
    named = re.search(r"GLOBAL ([\w.]+)|Trying to call ([^\n]+)", str(exc))
    return f"it asks for {named.group(1) or named.group(2)}" if named else "it is damaged or holds code"
