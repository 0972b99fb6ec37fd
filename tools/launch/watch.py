"""Tells of the death of processes within milliseconds, whoever their parent is: one pidfd each, and `poll`."""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import dataclass


@dataclass(frozen=True)
class Death:
    """A watched process that ended."""

    name: str
    pid: int


class Watch:
    """Watches processes by name. `wake` may be called from any thread and signal handler, the rest from one thread."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._descriptors: dict[int, Death] = {}
        self._gone: list[Death] = []

    def add(self, name: str, pid: int) -> None:
        """Watches a process instead of the one of this name so far; one that is gone already is told at once."""
        self.remove(name)
        try:
            self._descriptors[os.pidfd_open(pid)] = Death(name, pid)
        except ProcessLookupError:
            self._gone.append(Death(name, pid))

    def remove(self, name: str) -> None:
        self._gone = [death for death in self._gone if death.name != name]
        for descriptor in [fd for fd, death in self._descriptors.items() if death.name == name]:
            del self._descriptors[descriptor]
            os.close(descriptor)

    def keep(self, name: str) -> None:
        """Watches nobody but the process of this name."""
        for other in {death.name for death in (*self._descriptors.values(), *self._gone)} - {name}:
            self.remove(other)

    def pid(self, name: str) -> int | None:
        """The process of this name, if it lives as far as is known."""
        return next((death.pid for death in self._descriptors.values() if death.name == name), None)

    def wake(self) -> None:
        """Ends a `wait`, or the next one."""
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout_s: float) -> list[Death]:
        """Waits for a death, a `wake` or the time. Each death is told once."""
        poll = select.poll()
        for descriptor in (self._wake, *self._descriptors):
            poll.register(descriptor, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(0 if self._gone else max(0.0, timeout_s) * 1000)]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        died, self._gone = self._gone, []
        for descriptor in ready:
            if descriptor in self._descriptors:
                died.append(self._descriptors.pop(descriptor))
                os.close(descriptor)
        return died
