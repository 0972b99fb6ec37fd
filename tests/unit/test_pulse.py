"""Loops that hang, and those that only look like it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenrouter.deadline import DeadlineWatch, read_deadline, write_deadline
from tokenrouter.pulse import Pulse, Watchdog

PATIENCE_S = 30.0


@contextmanager
def watched(pulse: Pulse, patience_s: float) -> Iterator[threading.Event]:
    hangs = threading.Event()
    dog = Watchdog(pulse, patience_s, hangs.set)
    try:
        yield hangs
    finally:
        dog.stop()


def test_work_that_does_not_end_is_told() -> None:
    pulse = Pulse()
    with watched(pulse, 0.1) as hangs, pulse.working():
        assert hangs.wait(PATIENCE_S)


HOLDS_THE_INTERPRETER = """
import ctypes, threading
from tokenrouter.pulse import Pulse, Watchdog
from tokenrouter.triton import process
Watchdog(Pulse(), 0.2, lambda: None, lambda: process.leave_unless_called_again(1.0))
threading.Event().wait(3)
print("alive", flush=True)
ctypes.PyDLL(None).pause()
"""


def test_a_process_whose_interpreter_is_held_for_ever_ends_and_one_that_waits_does_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_INTERPRETER], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (1, "alive\n")
    assert 'File "<string>", line 8 in <module>' in done.stderr  # where it hung


def test_sleep_steps_and_many_turns_are_not() -> None:
    pulse = Pulse()
    with watched(pulse, 0.1) as hangs:
        time.sleep(0.3)
        with pulse.working(), pulse.excused():
            time.sleep(0.3)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            with pulse.working():
                time.sleep(0.001)
    assert not hangs.is_set()


def test_work_before_and_after_a_step_is_two_pieces() -> None:
    pulse = Pulse()
    with pulse.working():
        before = pulse.work
        with pulse.excused():
            assert pulse.work is None
        assert pulse.work is not None
        assert pulse.work != before
    assert pulse.work is None


def test_a_step_that_raises_leaves_the_loop_at_work() -> None:
    pulse = Pulse()
    with pulse.working():
        with pytest.raises(ValueError, match="step"), pulse.excused():
            raise ValueError("step")
        assert pulse.work is not None


def test_a_process_that_stood_still_did_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, then SIGCONT: the clock jumps, but nobody looked meanwhile."""
    pulse = Pulse()
    real, jump_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + jump_s[0])
    with watched(pulse, 5.0) as hangs, pulse.working():
        jump_s[0] = 3600.0
        assert not hangs.wait(0.6)


def test_deadline_is_told_once_when_it_is_written(tmp_path: Path) -> None:
    told: list[int] = []
    known = threading.Event()

    def take(at_ns: int) -> None:
        told.append(at_ns)
        known.set()

    watch = DeadlineWatch(tmp_path, take)
    assert read_deadline(tmp_path) is None
    write_deadline(tmp_path, 12345)
    assert known.wait(PATIENCE_S)
    watch.stop()
    assert told == [12345]
    assert [path.name for path in tmp_path.iterdir()] == ["deadline"]


def test_deadline_that_nobody_writes(tmp_path: Path) -> None:
    DeadlineWatch(tmp_path / "gone", lambda _: pytest.fail("nobody wrote one")).stop()
