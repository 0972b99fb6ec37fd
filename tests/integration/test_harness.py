"""The harness of these tests: who is blamed when a shared server dies, and what a session may leave behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.echo import WriteModel

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
_WATCHED = """
import pytest
from tests.support.watch import WATCH, pytest_runtest_setup, pytest_runtest_teardown
from tools.tritonserver.server import TritonServer

@pytest.fixture(scope="session")
def server():
    with WATCH.over(TritonServer({repository!r})) as running:
        yield running
"""
_DEATHS = """
import os, signal
from tests.support.echo import echo
from tests.support.waiting import ended, until

def kill(pid):
    os.kill(pid, signal.SIGKILL)
    until(lambda: ended(pid))

def test_first(server):
    assert echo(server, "a") == "a"

def test_server_dies(server):
    kill(server.pid)
    echo(server, "nobody answers")

def test_after_the_server(server):
    assert echo(server, "b") == "b"

def test_model_dies(server):
    kill(server.stub_pids()["echo"])

def test_after_the_model(server):
    assert echo(server, "c") == "c"

def test_that_stops_it_is_not_blamed(server):
    server.stop()
"""


_LEAVES = """
import subprocess, tempfile

def test_cleans_up():
    tempfile.TemporaryDirectory(prefix="removed-").cleanup()

def test_does_not():
    tempfile.mkdtemp(prefix="forgotten-")
    subprocess.Popen(["sleep", "60"])
"""


def run(folder: Path, conftest: str, tests: str) -> str:
    """What pytest says of tests of its own: the project's modules are there, its settings and hooks are not."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_inner.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += [f"--basetemp={folder / 'base'}", str(folder)]
    env = {**os.environ, "COLUMNS": "1000"}  # the summary's lines are cut at the terminal's width
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_shared_server_that_dies_is_blamed_on_one_test_and_replaced(tmp_path: Path, write_model: WriteModel) -> None:
    said = run(tmp_path, _WATCHED.format(repository=str(write_model())), _DEATHS)
    assert "1 failed, 5 passed, 2 errors" in said, said
    summary = said[said.index("short test summary") :]
    assert summary.count("the server died during this test") == 2
    (server,) = (line for line in summary.splitlines() if "ERROR" in line and "test_server_dies" in line)
    assert "tritonserver (process " in server
    assert "exit code -9" in said
    assert "Started HTTPService" in said
    (model,) = (line for line in summary.splitlines() if "ERROR" in line and "test_model_dies" in line)
    assert "model 'echo' (process " in model


def test_what_a_session_leaves_behind_is_named(tmp_path: Path) -> None:
    said = run(tmp_path, "from tests.support.leftovers import nothing_left", _LEAVES)
    assert "2 passed, 1 error" in said, said
    left = next(line for line in said.splitlines() if "this session of tests leaves behind" in line)
    process = re.search(r"process (\d+) \(sleep 60\)", left)
    assert process
    os.kill(int(process[1]), signal.SIGKILL)
    assert "forgotten-" in left
    assert "removed-" not in left
