"""A deployment under its supervisor, as `make serve` starts it, in processes of its own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from perf.load.ways import Endpoints
from tokenrouter.direct_http import http_open
from tokenrouter.metrics_page import scrape
from tools.tritonserver.installation import LaunchError
from tools.tritonserver.ports import free_port
from tools.tritonserver.repository_api import RepositoryApi

_READY_S = 300.0
_STOP_S = 90.0
_POLL_S = 0.1
_RESTARTS = "tokenrouter_restarts"
_SHARED_MEMORY = Path("/dev/shm")
ENTRY = "tokenrouter"
SERVER = "tritonserver"
FRONT = "openai"


class Service:
    """A context manager: starts `tools.launch` on free ports, waits until everything is ready, and ends it.

    Attributes:
        to: its ports.
        grpc_url: host:port.
        exit_code: of the launcher, once it has ended.
        seen: every process of it that `processes` has ever found.
    """

    def __init__(self, repository: Path) -> None:
        ports: list[int] = []
        for _ in range(5):
            ports.append(free_port(taken=ports))
        http, grpc, metrics, supervisor, openai = ports
        self.to = Endpoints(http, grpc, openai)
        self.grpc_url, self.metrics_url = f"127.0.0.1:{grpc}", f"http://127.0.0.1:{metrics}/metrics"
        self.exit_code: int | None = None
        self.seen: dict[int, psutil.Process] = {}
        self._supervisor_url = f"http://127.0.0.1:{supervisor}"
        self._key = secrets.token_hex(16)
        self._command = [
            *(sys.executable, "-m", "tools.launch", "--model-repository", str(repository), "--no-greeting"),
            *("--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)),
            *("--supervisor-port", str(supervisor), "--openai-port", str(openai), "--restart-limit", "1000000"),
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._printed = ""

    def __enter__(self) -> Service:
        env = {**os.environ, "TOKENROUTER_ADMIN_KEY": self._key}
        self._launcher = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, env=env
        )
        until = time.monotonic() + _READY_S
        while not self.ready():
            if self._launcher.poll() is not None or time.monotonic() > until:
                self.stop()
                raise LaunchError(f"the deployment did not become ready:\n{self.log_text()[-3000:]}")
            time.sleep(_POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._printed = self.log_text()
        self._log.close()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after a while."""
        if self.exit_code is not None:
            return
        self.processes()
        self._launcher.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._launcher.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self.exit_code = self._launcher.wait()

    def log_text(self) -> str:
        """What the launcher has printed, Triton's log included."""
        if self._log.closed:
            return self._printed
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    # --- what runs ------------------------------------------------------------------------------------------------

    @property
    def launcher_pid(self) -> int:
        return self._launcher.pid

    def processes(self) -> dict[str, int]:
        """Process ids of tritonserver, of every model, of the OpenAI-compatible server and of the launcher, by name."""
        found = {"launcher": self._launcher.pid}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._launcher.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if name := _role(process.cmdline()):
                        found[name] = process.pid
                        self.seen.setdefault(process.pid, process)
        return found

    def ready(self, name: str = "") -> bool:
        """Whether the supervisor says so of a model, or of everything."""
        with (
            suppress(OSError),
            http_open(f"{self._supervisor_url}/readyz{'/' if name else ''}{name}", timeout=5) as page,
        ):
            return int(page.status) == 200
        return False

    def restarts(self) -> dict[str, int]:
        """What the supervisor has brought back, by name."""
        page = scrape(f"{self._supervisor_url}/metrics", _RESTARTS)
        return {name: int(page.value(_RESTARTS, model=name)) for name in page.labels(_RESTARTS, "model")}

    def repository_api(self) -> RepositoryApi:
        """Triton's own, with the operator's key."""
        return RepositoryApi(f"http://127.0.0.1:{self.to.http}", self._key)

    @property
    def sockets(self) -> Path:
        """Where the models listen for each other."""
        return Path(psutil.Process(self.processes()[SERVER]).environ()["TOKENROUTER_RUNTIME_DIR"])

    def shared_memory(self) -> list[str]:
        """Files in /dev/shm of the launcher's servers, dead ones included."""
        return sorted(path.name for path in _SHARED_MEMORY.glob(f"tokenrouter-run-{self._launcher.pid}-*"))

    def left_over(self) -> list[str]:
        """Processes, shared memory and folders that outlived the launcher."""
        left = [f"process {pid}" for pid, process in self.seen.items() if _lives(process)]
        folders = Path(tempfile.gettempdir()).glob(f"tokenrouter-run-{self._launcher.pid}-*")
        return left + self.shared_memory() + sorted(map(str, folders))


def _role(command: list[str]) -> str:
    if command and Path(command[0]).name == SERVER:
        return SERVER
    if len(command) > 1 and command[1].endswith("/model.py"):
        return Path(command[1]).parent.parent.name
    return FRONT if "tokenrouter.openai_api" in command else ""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
