"""Servers that several tests share: where one died is said at that test, and the next one finds it started anew.

A conftest that imports the two hooks has them for the tests below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.support.waiting import ended
from tools.tritonserver.server import TritonServer

_LOG_LINES = 15


@dataclass
class _Watched:
    server: TritonServer
    models: bool
    stubs: dict[str, int] = field(default_factory=dict)
    down: bool = False

    def began(self) -> None:
        self.down = False
        if self.models:
            self.stubs = self.server.stub_pids()

    def dead(self) -> str:
        """Which process has ended by itself; "" if none has, or if a test stopped the server."""
        if self.down:
            return "tritonserver, which did not start again,"
        if not self.server.run_dir.is_dir():
            return ""
        if not self.server.is_running():
            return f"tritonserver (process {self.server.pid})"
        died = [f"model {model!r} (process {pid})" for model, pid in self.stubs.items() if ended(pid)]
        return ", ".join(died)

    def start_again(self) -> str:
        """Exit code and end of the log of the old one."""
        self.down = True
        code = self.server.stop()
        log = "\n".join(self.server.log_text().splitlines()[-_LOG_LINES:])
        self.server.start()
        self.began()
        return f"tritonserver's exit code {code}; the end of its log:\n{log}"


class Watch:
    """The shared servers that run now."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    @contextmanager
    def over(self, server: TritonServer, *, models: bool = True) -> Iterator[TritonServer]:
        """Runs a server and watches it.

        Args:
            server: not started yet; the same object serves again, on the same ports, after it died.
            models: whether its models' processes have to live, too.
        """
        with server:
            watched = _Watched(server, models)
            watched.began()
            self._watched.append(watched)
            try:
                yield server
            finally:
                self._watched.remove(watched)

    def replace_dead(self, when: str) -> str:
        """Starts every server anew that died. Returns what died, how and what its log says; "" if all live."""
        found = []
        for watched in self._watched:
            if dead := watched.dead():
                found.append(f"the server died {when}: {dead} ended; {watched.start_again()}")
        return "\n".join(found)


WATCH = Watch()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    died = WATCH.replace_dead("before this test, after the one before it")
    if died:
        pytest.fail(died, pytrace=False)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A new server stands before the test's fixtures end, so that they find nothing amiss."""
    died = WATCH.replace_dead("during this test")
    try:
        return (yield)
    finally:
        if died:
            pytest.fail(died, pytrace=False)
