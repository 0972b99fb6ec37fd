"""Engines that share a GPU load one after the other: each takes its share of what the one before has left free.

Triton may load models at once or in any order, one by one. So a model waits for the models of its `load_after` only if
they begin within a while, and then until they have loaded or failed. A lock file beside its socket, held while it
loads, says so; the kernel gives the lock up when the process dies.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenrouter.channel.unix import socket_path

PATIENCE_S = 30.0
_LOOK_S = 0.05

log = logging.getLogger(__name__)


@contextmanager
def turn_to_load(
    model: str, after: Sequence[str], directory: Path, *, patience_s: float = PATIENCE_S
) -> Iterator[None]:
    """Waits for the models in `after`; the body is to open the model's socket and load its engine.

    Args:
        model: who loads.
        after: models that load before, the first of all first.
        directory: where the models of this server put their sockets.
        patience_s: how long a model in `after` may take to begin, counted from when its predecessors are done.
    """
    for other in after:
        _wait_for(model, other, directory, patience_s)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # the last model to leave removes it, maybe meanwhile
    path = _lock_path(directory, model)
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _wait_for(model: str, other: str, directory: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not socket_path(directory, other).exists():
        if time.monotonic() >= deadline:
            log.warning("%s loads before %s, which has not begun to load", model, other)
            return
        time.sleep(_LOOK_S)
    try:
        lock = os.open(_lock_path(directory, other), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # removed: it has loaded
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _lock_path(directory: Path, model: str) -> Path:
    return directory / f"{model}.loading"
