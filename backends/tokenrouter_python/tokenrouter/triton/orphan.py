"""Ends a stub process whose tritonserver died without a word (kill -9, out of memory).

Triton's stub can then wait for ever in a queue that nobody writes to, and its shared memory and sockets stay. The
kernel tells of the death through a pidfd, so nothing is polled.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import threading
import time
from pathlib import Path

from tokenrouter.channel.unix import runtime_dir

_GRACE_S = 1.0
_REGION_MARK = "shm_region"


def leave_with_parent() -> None:
    """Starts the thread that waits for the parent's death."""
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:  # no such system call here (an old kernel or a sandbox): Triton's own clean-up has to do
        return
    threading.Thread(target=_wait, args=(parent, runtime_dir()), name="orphan", daemon=True).start()


def _wait(parent: int, sockets: Path) -> None:
    select.select([parent], [], [])
    # An orderly exit of the stub needs no help and wins the race.
    time.sleep(_GRACE_S)
    for region in _regions():
        with contextlib.suppress(OSError):
            (Path("/dev/shm") / region).unlink()
    shutil.rmtree(sockets, ignore_errors=True)
    os._exit(1)


def _regions() -> list[str]:
    """Names of the shared-memory regions that Triton gave this process on its command line."""
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    return [os.fsdecode(argument) for argument in arguments if _REGION_MARK.encode() in argument]
