"""tritonserver and the processes that it starts, one for every Python model."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

_PR_SET_PDEATHSIG = 1
_KILL_S = 10.0
_libc = ctypes.CDLL(None)


class Processes:
    """Started at once; dies with the thread that started it, and leaves no child behind when it is ended.

    Args:
        command: the server's command line.
        env: its whole environment.
        log: file that takes its output.
        keep: a descriptor that stays open in all of them.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: BinaryIO, keep: int) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._exit_code: int | None = None
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(keep,),
            preexec_fn=_die_with_parent,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._server.pid

    def is_running(self) -> bool:
        """Whether the server itself lives."""
        return self._server.poll() is None

    def look(self) -> None:
        """Notes the children that there are now, so that none outlives the server."""
        if self.is_running():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self.pid).children(recursive=True):
                    self._known.setdefault(process.pid, process)

    def stubs(self) -> dict[str, int]:
        """Process ids of the models' living Python processes, by model."""
        self.look()
        pids = {}
        for pid, process in self._known.items():
            command = _command(process)
            if _is_alive(process) and len(command) > 1 and command[1].endswith("/model.py"):
                pids[Path(command[1]).parent.parent.name] = pid
        return pids

    def end(self, patience_s: float) -> int:
        """SIGTERM, a bounded wait, SIGKILL by process id; then kills what is left. Returns the server's exit code."""
        if self._exit_code is None:
            self.look()
            self._exit_code = self._end_server(patience_s)
            self._kill_children()
        return self._exit_code

    def _end_server(self, patience_s: float) -> int:
        if self.is_running():
            self._server.send_signal(signal.SIGTERM)
            try:
                # Triton looks once a second whether its models have ended, and then needs some time itself.
                self._server.wait(patience_s + _KILL_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
        return self._server.wait()

    def _kill_children(self) -> None:
        left = [process for process in self._known.values() if _is_alive(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_KILL_S)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _die_with_parent() -> None:
    """Asks the kernel to send SIGTERM when the launcher dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
