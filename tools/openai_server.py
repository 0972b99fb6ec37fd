"""The OpenAI-compatible server as a process beside a running `tritonserver`."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from tokenrouter.loops.slices import short_slices
from tools.tritonserver.installation import LaunchError
from tools.tritonserver.ports import usable_port
from tools.tritonserver.processes import die_with_parent
from tools.tritonserver.server import TritonServer

TLS_VARIABLE = "TOKENROUTER_TLS_CERT"
"""Where the server finds its certificate, if it is not an argument."""
_READY_S = 60.0
_POLL_S = 0.1
_KILL_S = 10.0


def _opener() -> Callable[..., Any]:
    """Like `http_open`, whoever the certificate is for: this only asks whether a process of ours is up."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return build_opener(ProxyHandler({}), HTTPSHandler(context=context)).open


_open = _opener()


class OpenAiServer:
    """A context manager that starts it, and ends it; `wait` until it is ready.

    Args:
        triton: what it calls; must be running.
        repository: the model repository that Triton serves.
        entry: name of the entry model.
        port: where it listens; 0 takes a free port.
        host: address to listen on.
        arguments: further arguments of `python -m tokenrouter.openai_api`.
    """

    def __init__(
        self,
        triton: TritonServer,
        repository: Path,
        *,
        entry: str = "tokenrouter",
        port: int = 0,
        host: str = "127.0.0.1",
        arguments: Sequence[str] = (),
    ) -> None:
        self.port = usable_port("openai", port, host)
        self._address = "127.0.0.1" if host == "0.0.0.0" else host
        self._command = [
            *(sys.executable, "-m", "tokenrouter.openai_api"),
            *("--model-repository", str(repository), "--entry", entry),
            *("--url", triton.grpc_url, "--metrics-url", triton.metrics_url),
            *("--host", host, "--port", str(self.port), *arguments),
        ]
        self._scheme = "https" if os.environ.get(TLS_VARIABLE) or "--tls-cert" in arguments else "http"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL for clients, `/v1` included."""
        return f"{self._scheme}://{self._address}:{self.port}/v1"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Waits until it says that all models are ready.

        Raises:
            LaunchError: it ended, or is not ready in time.
        """
        end = time.monotonic() + _READY_S
        while self.is_running() and time.monotonic() < end:
            try:
                _open(self.url.removesuffix("/v1") + "/health/ready", timeout=5).close()
                return
            except OSError:
                time.sleep(_POLL_S)
        state = f"is not ready after {_READY_S:g} s" if self.is_running() else "ended before it was ready"
        raise LaunchError(f"the OpenAI-compatible server {state}; its own output says why")

    def start(self) -> None:
        """Starts the process, also anew after it ended; it ends with the thread that called this."""
        if self._process is not None:
            self._process.wait()  # it has ended: only its entry in the process table is left
        with short_slices():
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def __enter__(self) -> OpenAiServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
