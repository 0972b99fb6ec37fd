"""Publishes statistics from a thread of its own: a metric's update is a round trip to Triton, a page of them 10 ms."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_PERIOD_S = 0.25


class Publisher:
    """Calls `publish` at most four times a second while something changes, and once after the last change.

    Args:
        publish: sends what changed.
    """

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish
        self._dirty = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Something may have changed; callable from any thread, and cheap."""
        if not self._dirty.is_set():
            self._dirty.set()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._dirty.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            if self._stopped.wait(_PERIOD_S):
                return
            self._dirty.clear()
            try:
                self._publish()
            except Exception:
                log.exception("statistics could not be published")
