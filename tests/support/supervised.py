"""A launcher in a process of its own, with all that it starts, as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil

from tests.support.deaths import kill_model
from tests.support.waiting import PATIENCE_S, until
from tokenrouter.direct_http import http_open
from tools.tritonserver.ports import Ports, free_port
from tools.tritonserver.processes import children, model_of

PROJECT = Path(__file__).resolve().parents[2]
STARTED = "Ctrl-C stops the server"


@dataclass
class Supervised:
    """One launcher. Like a `TritonServer` it has `ports`, `http_url` and `grpc_url`."""

    process: subprocess.Popen[bytes]
    home: Path
    ports: Ports
    supervisor: int
    openai: int

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.metrics}/metrics"

    def output(self) -> str:
        """Everything that the launcher has printed, the server's log included."""
        return (self.home / "output").read_text("utf-8", "replace")

    def health(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and answer of the supervisor's endpoint."""
        try:
            with http_open(f"http://127.0.0.1:{self.supervisor}{path}", timeout=PATIENCE_S) as response:
                return response.status, json.load(response)
        except HTTPError as exc:
            with exc:
                return exc.code, json.load(exc)

    def ready(self) -> bool:
        return self.process.poll() is None and self.health("/readyz")[0] == 200

    def pids(self) -> dict[str, int]:
        """Process ids by model, of `tritonserver` and of `openai`."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            if child.name() == "tritonserver":
                found["tritonserver"] = child.pid
                found.update({model: pid for pid in children(child.pid) if (model := model_of(pid))})
            elif "tokenrouter.openai_api" in child.cmdline():
                found["openai"] = child.pid
        return found

    def kill(self, name: str, number: int = 9) -> None:
        """Sends a signal to one of `pids` and waits until the supervisor has brought it back."""
        before = self.health("/readyz")[1]["restarts"].get(name, 0)
        pid = self.pids()[name]
        if name in ("tritonserver", "openai"):
            os.kill(pid, number)
        else:
            kill_model(pid, name, self.metrics_url, number)
        self.wait_back(name, before + 1)

    def wait_back(self, name: str, restarts: int) -> None:
        """Until it was brought back for so many times, and everything is up."""
        until(
            lambda: self.health("/readyz")[1]["restarts"].get(name, 0) >= restarts and self.ready(),
            within_s=3 * PATIENCE_S,
            what=f"{name} is back",
        )

    def regions(self) -> list[Path]:
        """Shared memory of its servers."""
        return list(Path("/dev/shm").glob(f"tokenrouter-run-{self.process.pid}-*"))


@contextmanager
def supervised(repository: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Supervised]:
    """Runs a launcher until it has greeted; ends it if the test did not."""
    numbers: list[int] = []
    names = ("http", "grpc", "metrics", "supervisor", "openai")
    for _ in names:
        numbers.append(free_port(taken=numbers))
    ports = [f"--{name}-port={port}" for name, port in zip(names, numbers, strict=True)]
    command = [sys.executable, "-m", "tools.launch", f"--model-repository={repository}", *ports, *arguments]
    with tempfile.TemporaryDirectory(prefix="tl-") as name:  # pytest's own are too long for sockets
        home = Path(name)
        with (home / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env={**os.environ, "PYTHONPATH": str(PROJECT), "TMPDIR": name, **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        running = Supervised(process, home, Ports(*numbers[:3]), *numbers[3:])
        try:
            until(lambda: STARTED in running.output() or process.poll() is not None, within_s=3 * PATIENCE_S)
            assert process.poll() is None, running.output()
            until(running.ready, what="everything is up")
            yield running
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(PATIENCE_S)
