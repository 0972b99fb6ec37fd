"""Threads that are clients: each sends one request after the other, from `start` to `stop`."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from itertools import count

_BEYOND_S = 10.0


class ClientThreads(ABC):
    """Base of loops that keep so many requests running.

    Args:
        in_flight: how many clients there are.
        patience_s: longest that one request may take.
    """

    def __init__(self, in_flight: int, patience_s: float) -> None:
        self._patience_s = patience_s
        self._numbers = count()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(in_flight)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """Sends nothing more and waits for what runs. Returns how many clients hang all the same."""
        self._stopping.set()
        until = time.monotonic() + self._patience_s + _BEYOND_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    @abstractmethod
    def _client(self) -> None:
        """One client, until `_stopping` is set."""
