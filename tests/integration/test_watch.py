"""A shared server that dies is named at the one test in which it died, and the next test has a new one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.echo import WriteModel

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
_CONFTEST = """
import pytest
from tests.support.watch import WATCH, pytest_runtest_setup, pytest_runtest_teardown
from tools.tritonserver.server import TritonServer

@pytest.fixture(scope="session")
def server():
    with WATCH.over(TritonServer({repository!r})) as running:
        yield running
"""
_TESTS = """
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


def test_who_is_blamed_and_what_is_said(tmp_path: Path, write_model: WriteModel) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST.format(repository=str(write_model())))
    (tmp_path / "test_inner.py").write_text(_TESTS)
    # The importable folder is the project's; pytest's settings and hooks of the outer run stay out of it.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    env = {**os.environ, "COLUMNS": "1000"}  # the summary's lines are cut at the terminal's width
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110, check=False)
    said = done.stdout
    assert "1 failed, 5 passed, 2 errors" in said, said + done.stderr
    summary = said[said.index("short test summary") :]
    assert summary.count("the server died during this test") == 2
    (server,) = (line for line in summary.splitlines() if "ERROR" in line and "test_server_dies" in line)
    assert "tritonserver (process " in server
    assert "exit code -9" in said
    assert "Started HTTPService" in said
    (model,) = (line for line in summary.splitlines() if "ERROR" in line and "test_model_dies" in line)
    assert "model 'echo' (process " in model
