"""When all responses have to end: a file that who stops the server writes, and a thread in every model that reads it.

Triton tells a model of its end only after the last request is over, which is too late for requests that outlast the
grace period: Triton drops their connections, and a stream over HTTP then ends like a complete one. So the launcher
writes the time into the folder of the models' sockets before it sends SIGTERM.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

_NAME = "deadline"
_LOOK_S = 0.25


def write_deadline(directory: Path, at_ns: int) -> None:
    """All responses of the server whose models have their sockets here are to end at `at_ns` (CLOCK_MONOTONIC)."""
    new = directory / f"{_NAME}.new"
    new.write_text(f"{at_ns}\n", "ascii")
    os.replace(new, directory / _NAME)


def read_deadline(directory: Path) -> int | None:
    """The time (ns), or None as long as nobody wrote one."""
    try:
        return int((directory / _NAME).read_text("ascii"))
    except (OSError, ValueError):
        return None


class DeadlineWatch:
    """Calls `known` once, in a thread of its own, with the time that somebody wrote.

    Args:
        directory: where the models of this server put their sockets.
        known: gets the time (ns).
    """

    def __init__(self, directory: Path, known: Callable[[int], None]) -> None:
        self._directory = directory
        self._known = known
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deadline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while (at_ns := read_deadline(self._directory)) is None:
            if self._stopped.wait(_LOOK_S):
                return
        self._known(at_ns)
