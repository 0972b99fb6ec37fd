"""tritonserver and the processes that it starts, one for every Python model, and the workers that those start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import BinaryIO

import psutil

from tokenrouter.loops.slices import short_slices
from tools.tritonserver.connections import cut_clients

_PR_SET_PDEATHSIG = 1
_CUT_S = 1.0
_KILL_S = 10.0
_LOOK_S = 0.1
_libc = ctypes.CDLL(None)


class Processes:
    """Started at once; dies with the thread that started it, and leaves no process behind when it is ended.

    Args:
        command: the server's command line.
        env: its whole environment.
        log: file that takes its output.
        keep: a descriptor that stays open in all of them.
        mark: a variable of `env` whose value no other server has. All processes inherit it, so they are found by it,
            whoever their parent is by now.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: BinaryIO, keep: int, *, mark: str) -> None:
        self._mark = (mark, env[mark])
        self._exit_code: int | None = None
        with short_slices():  # a token passes three of its threads on its way to the client
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=(keep,),
                preexec_fn=die_with_parent,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._server.pid

    def is_running(self) -> bool:
        """Whether the server itself lives."""
        return self._server.poll() is None

    def stubs(self) -> dict[str, int]:
        """Process ids of the models' living Python processes, by model; the newest of each."""
        pids = {}
        for pid in sorted(children(self.pid)):
            if model := model_of(pid):
                pids[model] = pid
        return pids

    def end(
        self, patience_s: float, *, hangs: bool = False, cut_after_s: float = inf, ports: Collection[int] = ()
    ) -> int:
        """SIGTERM, a bounded wait, SIGKILL by process id; then kills what is left. Returns the server's exit code.

        Args:
            patience_s: how long the server may take; 0 kills it at once.
            cut_after_s: when clients of these ports are cut off, because no response is left: Triton waits for idle
                connections as long as for requests, and then fails to stop. If all its models have ended and it has not
                a second later, it waits for a process that died, and is killed; that counts as exit code 0.
            hangs: a model of it died and was loaded again. Then it may wait for ever for that process once its models
                have ended, or for connections whose requests died with it before it ends its models: it is killed as
                soon as the former is the case, or a second after the cut; that counts as exit code 0.
        """
        if self._exit_code is None:
            self._exit_code = self._end_server(patience_s, hangs, cut_after_s, ports)
            self._kill(self._rest)
        return self._exit_code

    def kill_orphans(self) -> None:
        """Ends processes of this server that are no longer below it: workers of a model that died hold its GPU."""
        self._kill(lambda: [process for process in self._rest() if not self._is_below(process)])

    def _end_server(self, patience_s: float, hangs: bool, cut_after_s: float, ports: Collection[int]) -> int:
        if not self.is_running():
            return self._server.wait()
        if patience_s > 0:
            self._server.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._server.wait(_LOOK_S)
            if passed_s >= cut_after_s:
                with contextlib.suppress(OSError):  # it ends without, later
                    cut_clients(self.pid, ports)
            cut = passed_s >= cut_after_s + _CUT_S
            if (hangs and cut) or ((hangs or cut) and not self.stubs()):
                self._server.kill()
                self._server.wait()
                return 0
        self._server.kill()
        return self._server.wait()

    def _kill(self, whom: Callable[[], list[psutil.Process]]) -> None:
        """Until none is found: one that was being started when we looked is found the next time."""
        end = time.monotonic() + _KILL_S
        while (left := whom()) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)

    def _is_below(self, process: psutil.Process) -> bool:
        try:
            return self.pid in (process.pid, *(parent.pid for parent in process.parents()))
        except psutil.NoSuchProcess:
            return True

    def _rest(self) -> list[psutil.Process]:
        name, value = self._mark
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                # A process that has ended has no environment, somebody else's is hidden.
                if process.pid != os.getpid() and process.environ().get(name) == value:
                    found.append(process)
        return found


def children(pid: int) -> list[int]:
    """As the kernel lists them; psutil reads every process of the machine instead."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def model_of(pid: int) -> str | None:
    """The model whose stub this process is; None for another one, and for one that only waits to be reaped."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if len(command) > 1 and command[1].endswith(b"/model.py"):
        return Path(os.fsdecode(command[1])).parent.parent.name
    return None


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; one without would be ended by it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def die_with_parent() -> None:
    """Asks the kernel to send this process SIGTERM when the thread that started it ends, however it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
