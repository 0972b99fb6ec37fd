"""Worker processes of the library: which they are, and who notices when one ends.

TensorRT-LLM tells nobody: requests in flight wait for ever, and the next submission blocks while it shuts down. The
kernel tells at once, through a file descriptor of the process that a loop can wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import psutil

from tokenrouter.engines.tensorrt_llm.facts import WORKER_COMMAND


def worker_pids() -> set[int]:
    """Worker processes below this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(WORKER_COMMAND in word for word in process.cmdline()):
                found.add(process.pid)
    return found


class Workers:
    """Watches processes.

    Args:
        pids: of the processes.
        loop: the running loop.
        died: called in the loop, once, with the process id of the first one that ends.
    """

    def __init__(self, pids: set[int], loop: asyncio.AbstractEventLoop, died: Callable[[int], None]) -> None:
        self._loop = loop
        self._died = died
        self._watching = True
        self._files: dict[int, int] = {}
        for pid in pids:
            try:
                self._files[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                loop.call_soon(self._ended, pid)
            else:
                loop.add_reader(self._files[pid], self._ended, pid)

    def _ended(self, pid: int) -> None:
        if self._watching:
            # What is left of a model that lost a part would keep its GPUs and serve nobody.
            for file in self._files.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(file, signal.SIGKILL)
            self.close()
            self._died(pid)

    def close(self) -> None:
        """Stops watching; in the loop."""
        self._watching = False
        files, self._files = self._files, {}
        for file in files.values():
            self._loop.remove_reader(file)
            os.close(file)
