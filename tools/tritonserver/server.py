"""One `tritonserver`: started, watched until it is ready, stopped without leaving anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from urllib.error import URLError

import psutil

from tools.tritonserver.http import http_open
from tools.tritonserver.installation import LaunchError, assemble_backends, find_installation
from tools.tritonserver.ports import Ports
from tools.tritonserver.run_directory import RunDirectory, remove_stale_run_directories

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_KILL_S = 10.0
_libc = ctypes.CDLL(None)


class TritonServer:
    """One running server; a context manager that starts it, waits until it is ready, and leaves nothing behind.

    The models' Python processes search modules in the caller's working directory first (so a policy may lie there).
    The server gets SIGTERM when the *thread* that called `start` ends, however it ends: start it from one that stays.

    Args:
        repository: the model repository.
        ports: see `Ports`.
        host: address to listen on.
        env: added to the server's environment.
        extra_args: further arguments of tritonserver.
        ready_timeout_s: how long `start` waits.
        exit_timeout_s: how long running requests may take when it stops.
        wait: called about ten times a second while it starts, for progress; gets the seconds so far.

    Raises:
        LaunchError: from `start`: with the failing model's own error, if there is one.
    """

    def __init__(
        self,
        repository: str | Path,
        *,
        ports: Ports | None = None,
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        ready_timeout_s: float = 120.0,
        exit_timeout_s: int = 10,
        wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._repository = Path(repository).resolve()
        self.ports = ports or Ports()
        self._host = host
        self._env = dict(env or {})
        self._extra_args = tuple(extra_args)
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._wait = wait
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None
        self._run_dir: RunDirectory | None = None
        self._log = ""
        self._known: dict[int, psutil.Process] = {}

    # --- what callers ask -----------------------------------------------------------------------------------------

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoint."""
        return f"http://{self._address}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """host:port of the gRPC endpoint."""
        return f"{self._address}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """URL of the metrics page."""
        return f"http://{self._address}:{self.ports.metrics}/metrics"

    @property
    def _address(self) -> str:
        return "127.0.0.1" if self._host == "0.0.0.0" else self._host

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        assert self._process is not None
        return self._process.pid

    @property
    def run_dir(self) -> Path:
        """The private directory of this server; removed by `stop`."""
        assert self._run_dir is not None
        return self._run_dir.path

    @property
    def log_path(self) -> Path:
        """The server's log; goes with the run directory."""
        return self.run_dir / "log"

    def stub_pids(self) -> dict[str, int]:
        """Process ids of the models' Python processes, by model."""
        self._remember()
        pids = {}
        for pid, process in self._known.items():
            command = _command(process)
            if _is_alive(process) and len(command) > 1 and command[1].endswith("/model.py"):
                pids[Path(command[1]).parent.parent.name] = pid
        return pids

    def log_text(self) -> str:
        """Everything the server has logged so far."""
        if self._run_dir is not None and self.log_path.is_file():
            self._log = self.log_path.read_text("utf-8", "replace")
        return self._log

    def loaded_models(self) -> list[str]:
        """Models that have been loaded so far, in the order of the log."""
        return list(dict.fromkeys(re.findall(r"successfully loaded '([^']+)'", self.log_text())))

    def version(self) -> str:
        """Triton's version, asked from the running server."""
        with http_open(f"{self.http_url}/v2", timeout=5) as response:
            return str(json.load(response)["version"])

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    # --- life cycle -----------------------------------------------------------------------------------------------

    def start(self) -> TritonServer:
        """Starts the server and waits until it is ready. After `stop` it may start again, on the same ports."""
        self._exit_code = None
        self._known.clear()
        if not self._repository.is_dir():
            raise LaunchError(f"model repository {self._repository} is no folder")
        self.ports = self.ports.resolved(self._host)
        self.installation = find_installation()
        remove_stale_run_directories()
        self._run_dir = RunDirectory.create()
        try:
            self._spawn()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> int | None:
        """SIGTERM, a bounded wait, SIGKILL by process id; then removes what is left. Returns the exit code."""
        self._remember()
        if self._process is not None and self._exit_code is None:
            self._exit_code = self._end()
            self._end_stubs()
        self.log_text()
        if self._run_dir is not None:
            self._run_dir.remove()
        return self._exit_code

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self) -> None:
        assert self._run_dir is not None
        backends = assemble_backends(self.installation, self.run_dir / "backends")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command_line(backends),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                # The lock of the run directory stays taken while anything of the server lives.
                pass_fds=(self._run_dir.lock,),
                preexec_fn=_die_with_parent,
                start_new_session=True,
            )

    def _command_line(self, backends: Path) -> list[str]:
        assert self._run_dir is not None
        ports = self.ports
        return [
            str(self.installation.binary),
            f"--model-repository={self._repository}",
            f"--backend-directory={backends}",
            # The key "python" takes effect for Python-based backends too; a key with our backend's own name does not.
            f"--backend-config=python,shm-region-prefix-name={self._run_dir.memory_prefix}",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--http-address={self._host}",
            f"--grpc-address={self._host}",
            f"--metrics-address={self._host}",
            f"--http-port={ports.http}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-port={ports.metrics}",
            *self._extra_args,
        ]

    def _environment(self) -> dict[str, str]:
        assert self._run_dir is not None
        env = {"HF_HUB_OFFLINE": "1", **os.environ, "TOKENROUTER_RUNTIME_DIR": str(self._run_dir.channel)}
        env["TOKENROUTER_EXIT_TIMEOUT_S"] = str(self._exit_timeout_s)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        if self.installation.libraries:
            paths = [*map(str, self.installation.libraries), env.get("LD_LIBRARY_PATH", "")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        return {**env, **self._env}

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        while not self._is_ready():
            self._remember()
            elapsed = time.monotonic() - started
            if not self.is_running():
                raise LaunchError(self._explain("tritonserver ended before it was ready"))
            if elapsed > self._ready_timeout_s:
                raise LaunchError(self._explain(f"not ready after {self._ready_timeout_s:g} s"))
            self._wait(elapsed)
            time.sleep(_POLL_S)
        self._remember()
        self._wait(time.monotonic() - started)

    def _is_ready(self) -> bool:
        try:
            with http_open(f"{self.http_url}/v2/health/ready", timeout=2) as response:
                return int(response.status) == 200
        except (URLError, OSError):
            return False

    def _explain(self, what: str) -> str:
        """The models' own errors if there are any, else the end of the log."""
        log = self.log_text()
        errors = model_errors(log)
        if errors:
            return "\n".join(f"model {name!r} does not load: {error}" for name, error in errors.items())
        complaints = [line for line in log.splitlines() if _COMPLAINT.search(line)]
        return f"{what}; from its log:\n" + "\n".join(complaints or log.splitlines()[-15:])

    def _remember(self) -> None:
        """Notes child processes, so that none outlives the server."""
        if not self.is_running():
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True):
                self._known.setdefault(process.pid, process)

    def _end(self) -> int:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                # Triton looks once a second whether its models have ended, and then needs some time itself.
                self._process.wait(self._exit_timeout_s + _KILL_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def _end_stubs(self) -> None:
        left = [process for process in self._known.values() if _is_alive(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_KILL_S)


_COMPLAINT = re.compile(r"^E\d|error: |unrecognized option")
_FAILURES = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)"),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)"),
    re.compile(r"failed to load model '(?P<model>[^']+)': (?P<reason>.*)"),
)


def model_errors(log: str) -> dict[str, str]:
    """Why models failed to load, by model, from a server's log."""
    errors: dict[str, str] = {}
    for pattern in _FAILURES:
        for found in pattern.finditer(log):
            reason = found["reason"].strip().removesuffix('"').replace("\\n", "\n").replace('\\"', '"')
            errors.setdefault(found["model"], reason.strip())
    return errors


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _die_with_parent() -> None:
    """Asks the kernel to send SIGTERM when the launcher dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
