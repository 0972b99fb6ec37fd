"""What a model's process sets up for itself before anything else: who may read its memory, and how it tells of a fault.

Triton starts one process per model. Its command line is: itself, the model's file, the name of a shared-memory region,
two sizes, the server's process id, and more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_REGION_MARK = "shm_region"
_STDERR = 2


def arguments() -> list[str]:
    """This process's command line."""
    return [os.fsdecode(argument) for argument in Path("/proc/self/cmdline").read_bytes().split(b"\0")]


def regions() -> list[Path]:
    """The shared-memory regions that Triton gave this process: prompts and answers travel through them."""
    return [_SHARED_MEMORY / argument for argument in arguments() if _REGION_MARK in argument]


def make_private() -> None:
    """Triton creates the regions readable for everybody, whatever the umask says. A reload makes new ones."""
    for region in regions():
        with contextlib.suppress(FileNotFoundError):
            region.chmod(0o600)


def close_inherited_sockets() -> None:
    """tritonserver's, clients' connections among them: a model that is loaded while it serves inherits them all.

    A client would never see the end of a connection that tritonserver has closed. To be called before this process
    opens sockets of its own.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > _STDERR and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def dump_stacks_on_request() -> None:
    """SIGUSR1, and a crash, write the stacks of all threads to stderr, which is the server's log."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def spare_collector() -> None:
    """What lives now lives to the end, so Python's cyclic collector need not look at it again.

    A full collection stops every stream: 0.25 s in the entry model and 1 s in a model with PyTorch on two busy cores,
    and microseconds afterwards. The second one tells the collector that little is left, or it would wait for a quarter
    as much again and keep free lists as long.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def leave_unless_called_again(within_s: float) -> None:
    """Ends this process, with all stacks in the log, unless this is called again in time.

    faulthandler's timer needs no interpreter. A call of Triton's stub may hold that for ever, such as one of a metric
    whose server has died, and then no thread of ours could end anything.
    """
    faulthandler.dump_traceback_later(within_s, exit=True)


def may_be_silent() -> None:
    """Takes back `leave_unless_called_again`."""
    faulthandler.cancel_dump_traceback_later()


def leave() -> NoReturn:
    """Ends this process at once, and the worker processes of its engine: nobody would end them."""
    with contextlib.suppress(psutil.Error):
        for worker in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                worker.kill()
    os._exit(1)


def abandon(why: str) -> NoReturn:
    """Ends this process at once with all stacks in the log; who watches it starts it again, others see it dead."""
    sys.stderr.write(f"{why}; the stacks of all threads:\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    leave()
