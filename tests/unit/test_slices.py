from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.loops_server import Server
from tokenrouter.engines.emulated.engine import EmulatedEngine
from tokenrouter.loops.slices import SLICE_NS, short_slices, shorten_slices, usual_slices

_GETATTR = {"x86_64": 315, "aarch64": 275}
_LINUX = tuple(int(part) for part in platform.release().split(".")[:2]) if sys.platform == "linux" else (0, 0)

pytestmark = [
    pytest.mark.skipif(platform.machine() not in _GETATTR, reason="the number of its system call is not known"),
    pytest.mark.skipif(_LINUX < (6, 12), reason="Linux keeps slices from 6.12 on"),
]


def scheduling(thread: int = 0) -> tuple[int, int, int]:
    """Policy, nice value and slice (ns) of a thread; 0 is the one that asks."""
    buffer = ctypes.create_string_buffer(48)
    number = _GETATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, thread, buffer, len(buffer), 0) == 0
    _, policy, _, nice, _, slice_ns, _, _ = struct.unpack("=IIQiIQQQ", buffer.raw)
    return policy, nice, slice_ns


def in_a_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_only_the_slice_of_the_thread_that_asks_changes() -> None:
    mine, found = scheduling(), []

    def ask() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        assert shorten_slices()
        found.append(scheduling())

    in_a_thread(ask)
    assert found == [(os.SCHED_OTHER, 19, SLICE_NS)]
    assert scheduling() == mine


def test_what_is_started_meanwhile_has_them_and_can_take_them_back() -> None:
    """A process, as tritonserver is one, and a thread in which an engine's own threads would begin."""
    mine, found = scheduling(), []

    def ask() -> None:
        with short_slices(), subprocess.Popen(["sleep", "60"]) as process:
            found.append(scheduling(process.pid))
            in_a_thread(lambda: found.append(scheduling()))
            in_a_thread(lambda: found.append((usual_slices(), *scheduling())))
            process.kill()
        found.append(scheduling())

    in_a_thread(ask)
    policy, nice, _ = mine
    assert found == [(policy, nice, SLICE_NS), (policy, nice, SLICE_NS), (True, *mine), mine]


def test_a_thread_that_is_scheduled_otherwise_stays_so() -> None:
    found = []

    def ask() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        assert not shorten_slices()
        found.append(os.sched_getscheduler(0))

    in_a_thread(ask)
    assert found == [os.SCHED_BATCH]


def loops_of(serve: Callable[..., Server]) -> dict[str, list[int]]:
    """Slices of a server's loops' threads, by kind of loop."""
    before = set(threading.enumerate())
    serve().start("small", "large").submit().final()
    found: dict[str, list[int]] = {}
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("orchestrator", "decoding")):
            found.setdefault(thread.name.partition("-")[0], []).append(scheduling(thread.native_id or 0)[2])
    return found


def test_loops_ask_for_short_slices(serve: Callable[..., Server]) -> None:
    assert loops_of(serve) == {"orchestrator": [SLICE_NS], "decoding": [SLICE_NS, SLICE_NS]}


def test_a_loop_that_computes_has_the_usual_ones(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Triton passed on to it."""
    info = EmulatedEngine.info
    busy = property(lambda engine: replace(info.__get__(engine), computes_here=True))
    monkeypatch.setattr(EmulatedEngine, "info", busy)
    usual = scheduling()[2]
    with short_slices():
        slices = loops_of(serve)
    assert slices == {"orchestrator": [SLICE_NS], "decoding": [usual, usual]}
