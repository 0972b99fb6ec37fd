"""Threads for what takes long before a request can be admitted: reading megabytes, loading a policy.

Small requests are read on Triton's own thread, in their order. What would hold it up, and with it everybody who comes
next, goes here; the entry queue gives it the place of its arrival nevertheless.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from tokenrouter.errors import Overloaded, RouterError
from tokenrouter.orchestrator.errors import stopping

SMALL_BYTES = 1 << 14
"""Requests up to this size take about a millisecond to read."""
_MOST_BYTES = 64 << 20


class ReadingPool:
    """See the module's text.

    Args:
        name: of its threads.
        most_bytes: how much may wait for them.
    """

    def __init__(self, name: str, *, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"reading-{name}")

    def put(self, job: Callable[[], None], size: int, *, refuse: Callable[[RouterError], None]) -> None:
        """Runs a job soon, which must not raise; `refuse` is called instead if the server stops before.

        Args:
            job: what to do.
            size: bytes of the request.
            refuse: tells the client.

        Raises:
            Overloaded: too much waits already.
        """
        with self._lock:
            if self._bytes and self._bytes + size > self._most_bytes:
                raise Overloaded(
                    f"{self._bytes} bytes of large requests wait to be read already (at most {self._most_bytes}); "
                    "try again later"
                )
            self._bytes += size
        try:
            self._pool.submit(job).add_done_callback(partial(self._done, size, refuse))
        except RuntimeError:  # it has been shut down
            self._forget(size)
            refuse(stopping())

    def stop(self) -> None:
        """Ends the threads after the jobs that run; those that wait are refused."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _done(self, size: int, refuse: Callable[[RouterError], None], future: Future[None]) -> None:
        self._forget(size)
        if future.cancelled():
            refuse(stopping())

    def _forget(self, size: int) -> None:
        with self._lock:
            self._bytes -= size
