"""A launcher of one host in a process of its own, its output marked with the host's name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tokenrouter.channel.tls import FOLDER_VARIABLE
from tokenrouter.direct_http import is_ok
from tools.errors import CommandError
from tools.tritonserver.ports import free_port
from tools.tritonserver.processes import die_with_parent

_POLL_S = 0.1
_END_S = 60.0


class LaunchedHost:
    """A context manager; `wait` until everything on it is ready.

    Args:
        name: for its output.
        repository: the model repository.
        models: what it loads.
        address: where its endpoints listen.
        keys: folder of its certificate.
    """

    def __init__(self, name: str, repository: Path, models: Sequence[str], *, address: str, keys: Path) -> None:
        self._name = name
        ports: list[int] = []
        for _ in range(4):
            ports.append(free_port(address, ports))
        self._command = [
            *(sys.executable, "-m", "tools.launch", "--model-repository", str(repository), "--host", address),
            *("--no-openai", "--no-greeting", "--exit-timeout", "5", "--load", *models),
        ]
        for option, port in zip(("http", "grpc", "metrics", "supervisor"), ports, strict=True):
            self._command += [f"--{option}-port", str(port)]
        self._env = {**os.environ, FOLDER_VARIABLE: str(keys)}
        self.grpc_url = f"{address}:{ports[1]}"
        self.metrics_url = f"http://{address}:{ports[2]}/metrics"
        self.health_url = f"http://{address}:{ports[3]}"

    def __enter__(self) -> LaunchedHost:
        self._process = subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()
        return self

    def wait(self, path: str = "/readyz", *, within_s: float = 180.0) -> None:
        """Until a path of its supervisor is green.

        Raises:
            CommandError: it ended, or is not ready in time.
        """
        end = time.monotonic() + within_s
        while not is_ok(self.health_url + path, 5):
            if self._process.poll() is not None:
                raise CommandError(f"{self._name} ended; its output above says why")
            if time.monotonic() >= end:
                raise CommandError(f"{self._name} is not ready after {within_s:g} s; its output above says why")
            time.sleep(_POLL_S)

    def _copy(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"{self._name} | {line}", end="", flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
