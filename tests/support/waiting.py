"""Bounded waits for conditions; nothing in the tests sleeps for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

from tokenrouter.metrics_page import busy, scrape
from tools.tritonserver.server import TritonServer

T = TypeVar("T")

PATIENCE_S = 60.0
"""Long enough for a machine whose cores are busy with other things."""

_POLL_S = 0.01
_SETTLED_S = 0.4


def until(condition: Callable[[], T], *, within_s: float = PATIENCE_S, what: str = "") -> T:
    """Waits until `condition()` is true and returns it; fails after `within_s`."""
    end = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= end:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}; last value {found!r}")
        time.sleep(_POLL_S)


def metric(server: TritonServer, name: str, **labels: str) -> float:
    """The sum over all samples `tokenrouter_{name}` with these labels."""
    name = f"tokenrouter_{name}"
    return scrape(server.metrics_url, name).value(name, **labels)


def wait_idle(server: TritonServer) -> None:
    """Waits until no model holds or runs anything.

    Gauges are published a little later than things happen, so one look may see the time before the work: they have to
    stay at 0.
    """
    idle_since = time.monotonic()

    def settled() -> bool:
        nonlocal idle_since
        if busy(server.metrics_url):
            idle_since = time.monotonic()
        return time.monotonic() - idle_since > _SETTLED_S

    until(settled, what="all gauges at 0")


def ended(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
