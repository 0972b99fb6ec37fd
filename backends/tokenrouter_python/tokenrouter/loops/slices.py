"""Short time slices for threads that run for 0.1 ms when something comes, and are waited for: loops, Triton's own.

Where cores are busy, Linux lets whoever runs go on for a slice (1 ms or more, and to the timer's next tick), unless who
wakes up asks for a shorter one. The share of the cores that a thread gets, and its nice value, stay as they are.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SLICE_NS = 100_000
"""The shortest that Linux takes."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority; runtime, which is the slice of an ordinary thread; deadline
# and period, which it has none of.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def shorten_slices() -> bool:
    """Asks for short slices for the calling thread, and what it starts. Returns whether Linux takes that.

    Linux does something with it from 6.12 on, and older ones take it too. A thread that is scheduled otherwise than
    ordinary ones (real time, batch) stays as it is.
    """
    return _set_slice(SLICE_NS)


def usual_slices() -> bool:
    """Takes that back: for what starts threads that compute, and are not waited for one by one."""
    return _set_slice(0)


@contextmanager
def short_slices() -> Iterator[None]:
    """What the calling thread starts meanwhile has them."""
    shorten_slices()
    try:
        yield
    finally:
        usual_slices()


def _set_slice(slice_ns: int) -> bool:
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, attributes, 0) == 0:
        return True
    log.info("this thread cannot have other time slices: %s", os.strerror(ctypes.get_errno()))
    return False
