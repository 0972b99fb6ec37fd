"""Ends a stub process whose tritonserver died without a word (kill -9, out of memory).

Triton's stub can then wait for ever in a queue that nobody writes to, and its shared memory and sockets stay. The
kernel tells of the death through a pidfd, so nothing is polled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tokenrouter.channel.unix import runtime_dir
from tokenrouter.triton import process

_GRACE_S = 1.0
_SERVER_PID = 5


def leave_with_parent() -> None:
    """Starts the thread that waits for the server's death; leaves at once if it is dead already."""
    server = server_pid(process.arguments(), os.getppid())
    try:
        descriptor = os.pidfd_open(server)
    except ProcessLookupError:
        _leave(runtime_dir())
    except OSError:  # no such system call here (an old kernel or a sandbox): Triton's own clean-up has to do
        return
    else:
        threading.Thread(target=_wait, args=(descriptor, runtime_dir()), name="orphan", daemon=True).start()


def server_pid(arguments: Sequence[str], parent: int) -> int:
    """Process id of the tritonserver that started a stub.

    It is the parent, unless the server died while the stub started: the parent is somebody else then (init, or a
    reaper), who lives on. So the number that the stub was given counts, where there is one.

    Args:
        arguments: the stub's command line: itself, the model's file, a region's name, two sizes, the server's pid.
        parent: process id of the parent.
    """
    given = arguments[_SERVER_PID] if len(arguments) > _SERVER_PID else ""
    return int(given) if given.isdecimal() and int(given) > 0 else parent


def _wait(server: int, sockets: Path) -> None:
    select.select([server], [], [])
    faulthandler.disable()  # Triton's own way out of this often crashes, which would be no news
    # An orderly exit of the stub needs no help and wins the race.
    time.sleep(_GRACE_S)
    _leave(sockets)


def _leave(sockets: Path) -> None:
    for region in process.regions():
        with contextlib.suppress(OSError):
            region.unlink()
    shutil.rmtree(sockets, ignore_errors=True)
    process.leave()
