"""Memory of a deployment's processes while it lives through chaos: by role, whichever process has it just then."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import psutil

from perf.chaos.service import Service
from perf.load.soak.memory import MEASURES, Sample, look

_INTERVAL_S = 2.0
_SLACK_FILES = 4


class Sampler:
    """A context manager; looks every two seconds.

    Attributes:
        samples: `at_s` counts from its beginning.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._first_files = len(service.shared_memory())
        self.samples: list[Sample] = []

    def __enter__(self) -> Sampler:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def leaks(self) -> list[str]:
        """More shared memory than at the beginning, and processes of models that have none."""
        found = []
        if (files := len(self._service.shared_memory())) > self._first_files + _SLACK_FILES:
            found.append(f"{files} files of shared memory, at first {self._first_files}")
        current = set(self._service.processes().values())
        found += [
            f"process {pid} outlived its successor"
            for pid, process in self._service.seen.items()
            if pid not in current and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        return found

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            for name, pid in self._service.processes().items():
                with suppress(OSError, psutil.Error, KeyError):
                    values = look(pid)
                    if values.keys() >= set(MEASURES):  # one that is just ending has no memory any more
                        self.samples.append(Sample(time.monotonic() - self._began_s, name, values))
