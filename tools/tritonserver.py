"""Finds, prepares, starts and stops a `tritonserver` that serves a model repository with our backend."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

import psutil

BACKENDS = Path(__file__).resolve().parent.parent / "backends"
CONTAINER = Path("/opt/tritonserver")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1


class LaunchError(Exception):
    """Why the server cannot be started, or did not become ready."""


@dataclass(frozen=True)
class Installation:
    """A Triton on this machine.

    Attributes:
        binary: the `tritonserver` executable.
        python_backend: files of Triton's Python backend that our Python-based backend runs on.
        libraries: what LD_LIBRARY_PATH needs, or None.
        origin: how to call it in a message.
    """

    binary: Path
    python_backend: tuple[Path, ...]
    libraries: Path | None
    origin: str


def find_installation() -> Installation:
    """NVIDIA's container first, then PATH, then the `nvidia-pytriton` wheel.

    Raises:
        LaunchError: there is none, or none for this Python version.
    """
    on_path = shutil.which("tritonserver")
    for binary in (CONTAINER / "bin" / "tritonserver", Path(on_path) if on_path else None):
        if binary is not None and binary.is_file():
            backend = binary.resolve().parent.parent / "backends" / "python"
            return Installation(binary, tuple(sorted(backend.glob("*"))), None, str(binary))
    return _wheel()


def _wheel() -> Installation:
    try:
        import pytriton
    except ImportError as exc:
        raise LaunchError(
            "no tritonserver found: neither NVIDIA's container, nor PATH, nor the nvidia-pytriton wheel; run make venv"
        ) from exc
    package = Path(pytriton.__file__).resolve().parent
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise LaunchError(
            f"the nvidia-pytriton wheel has no Python backend stub for Python {version}; use 3.10 to 3.12"
        )
    backend = root / "backends" / "python"
    files = (backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub)
    libraries = package.parent / "nvidia_pytriton.libs"
    return Installation(root / "bin" / "tritonserver", files, libraries, "the nvidia-pytriton wheel")


def free_port() -> int:
    """A TCP port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Ports:
    """Where the server listens; 0 takes a free port."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def resolved(self, host: str) -> Ports:
        """The same with every 0 replaced.

        Raises:
            LaunchError: a port is in use; names the Makefile variable.
        """
        values = {}
        for name, port in (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)):
            if port and not _is_free(host, port):
                raise LaunchError(
                    f"port {port} ({name}) is in use; choose another: make serve {name.upper()}_PORT={port + 1000}"
                )
            values[name] = port or free_port()
        return Ports(**values)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class TritonServer:
    """One running server; a context manager that starts it, waits until it is ready, and leaves nothing behind.

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
        self._wanted_ports = ports or Ports()
        self._host = host
        self._env = dict(env or {})
        self._extra_args = tuple(extra_args)
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._wait = wait
        self._process: subprocess.Popen[bytes] | None = None
        self._run_dir: Path | None = None
        self._log = ""
        self._known: dict[int, psutil.Process] = {}
        self._regions: set[str] = set()

    # --- what callers ask -----------------------------------------------------------------------------------------

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoint."""
        return f"http://{self._host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """host:port of the gRPC endpoint."""
        return f"{self._host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """URL of the metrics page."""
        return f"http://{self._host}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        assert self._process is not None
        return self._process.pid

    @property
    def run_dir(self) -> Path:
        """The private directory of this server; removed by `stop`."""
        assert self._run_dir is not None
        return self._run_dir

    def stub_pids(self) -> dict[str, int]:
        """Process ids of the models' Python processes, by model."""
        self._remember()
        pids = {}
        for pid, process in self._known.items():
            command = _command(process)
            if process.is_running() and len(command) > 1 and command[1].endswith("/model.py"):
                pids[Path(command[1]).parent.parent.name] = pid
        return pids

    def log_text(self) -> str:
        """Everything the server has logged so far."""
        if self._run_dir is not None and (self._run_dir / "log").is_file():
            self._log = (self._run_dir / "log").read_text("utf-8", "replace")
        return self._log

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    # --- life cycle -----------------------------------------------------------------------------------------------

    def start(self) -> TritonServer:
        """Starts the server and waits until it is ready."""
        if not self._repository.is_dir():
            raise LaunchError(f"model repository {self._repository} is no folder")
        self.ports = self._wanted_ports.resolved(self._host)
        self.installation = find_installation()
        self._run_dir = Path(tempfile.mkdtemp(prefix="tokenrouter-"))
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
        code = None
        if self._process is not None:
            code = self._end()
        self.log_text()
        for process in self._known.values():
            if process.is_running():
                process.kill()
        for region in self._regions:
            (Path("/dev/shm") / region).unlink(missing_ok=True)
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        return code

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self) -> None:
        assert self._run_dir is not None
        backends = _assemble_backends(self.installation, self._run_dir / "backends")
        ports = self.ports
        arguments = [
            str(self.installation.binary),
            f"--model-repository={self._repository}",
            f"--backend-directory={backends}",
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
        with (self._run_dir / "log").open("wb") as log:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                preexec_fn=_die_with_parent,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        assert self._run_dir is not None
        channel = self._run_dir / "channel"
        channel.mkdir(mode=0o700)
        env = {**os.environ, "TOKENROUTER_RUNTIME_DIR": str(channel), "HF_HUB_OFFLINE": "1"}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        if self.installation.libraries is not None:
            paths = [str(self.installation.libraries), env.get("LD_LIBRARY_PATH", "")]
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

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.http_url}/v2/health/ready", timeout=2) as response:
                return int(response.status) == 200
        except (URLError, OSError):
            return False

    def _explain(self, what: str) -> str:
        """The models' own errors if there are any, else the end of the log."""
        log = self.log_text()
        errors = model_errors(log)
        if errors:
            return "\n".join(f"model {name!r} does not load: {error}" for name, error in errors.items())
        return f"{what}; the end of its log:\n" + "\n".join(log.splitlines()[-15:])

    def _remember(self) -> None:
        """Notes child processes and their shared memory, so that they can be cleaned up after a crash."""
        if not self.is_running():
            return
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in children:
            if process.pid not in self._known:
                self._known[process.pid] = process
            self._regions.update(part for part in _command(process) if "shm_region" in part)

    def _end(self) -> int:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._exit_timeout_s + 10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()


def model_errors(log: str) -> dict[str, str]:
    """Why models failed to load, by model, from a server's log."""
    errors: dict[str, str] = {}
    for line in log.splitlines():
        marker = "failed to load '"
        if marker in line and " version " in line:
            name, _, rest = line.split(marker, 1)[1].partition("'")
            errors.setdefault(name, rest.partition(": ")[2].strip().strip('"') or rest)
    return errors


def _assemble_backends(installation: Installation, folder: Path) -> Path:
    """A backend directory. Triton refuses libraries behind links out of it, so its own files are copied."""
    python = folder / "python"
    python.mkdir(parents=True)
    for file in installation.python_backend:
        if file.is_file():
            shutil.copy2(file, python / file.name)
    (folder / "tokenrouter_python").symlink_to(BACKENDS / "tokenrouter_python", target_is_directory=True)
    return folder


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _die_with_parent() -> None:
    """Asks the kernel to send SIGTERM when the launcher dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
