"""Finds, prepares, starts and stops a `tritonserver` that serves a model repository with our backend."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import psutil

BACKENDS = Path(__file__).resolve().parent.parent / "backends"
CONTAINER = Path("/opt/tritonserver")
_SHARED_MEMORY = Path("/dev/shm")
_RUN_DIR_PREFIX = "tokenrouter-run-"
_LONGEST_CHANNEL_PATH = 80  # a socket's path has at most 107 bytes; the rest is for the model's name
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_KILL_S = 10.0
_libc = ctypes.CDLL(None)

http_open = build_opener(ProxyHandler({})).open
"""Opens URLs of a server on this machine, whatever proxy the environment names."""


class LaunchError(Exception):
    """Why the server cannot be started, or did not become ready."""


@dataclass(frozen=True)
class Installation:
    """A Triton on this machine.

    Attributes:
        binary: the `tritonserver` executable.
        python_backend: files of Triton's Python backend that our Python-based backend runs on.
        libraries: what LD_LIBRARY_PATH needs.
        origin: how to call it in a message.
        other_backends: folders of further backends that it brings.
    """

    binary: Path
    python_backend: tuple[Path, ...]
    libraries: tuple[Path, ...]
    origin: str
    other_backends: tuple[Path, ...] = ()


def find_installation() -> Installation:
    """NVIDIA's container first, then PATH, then the `nvidia-pytriton` wheel.

    Raises:
        LaunchError: there is none, or none for this Python version.
    """
    on_path = shutil.which("tritonserver")
    for binary in (CONTAINER / "bin" / "tritonserver", Path(on_path) if on_path else None):
        if binary is not None and binary.is_file():
            return _native(binary)
    return _wheel()


def _native(binary: Path) -> Installation:
    root = binary.resolve().parent.parent
    python = root / "backends" / "python"
    if not (python / "libtriton_python.so").is_file():
        raise LaunchError(f"{binary} has no Python backend: {python} holds no libtriton_python.so")
    release = root / "TRITON_VERSION"
    version = f" {release.read_text().strip()}" if release.is_file() else ""
    others = tuple(sorted(path for path in python.parent.iterdir() if path.is_dir() and path != python))
    return Installation(binary, tuple(sorted(python.glob("*"))), (), f"{binary}{version}", others)


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
    libraries = (package.parent / "nvidia_pytriton.libs", *_shared_python(version))
    return Installation(root / "bin" / "tritonserver", files, libraries, f"nvidia-pytriton {pytriton.__version__}")


def _shared_python(version: str) -> tuple[Path, ...]:
    """Where the stub finds the shared libpython that it links to, if the linker does not know by itself."""
    library = f"libpython{version}.so.1.0"
    own = Path(sysconfig.get_config_var("LIBDIR") or "")
    if (own / library).is_file():
        return (own,)
    if ctypes.util.find_library(f"python{version}") is None:
        raise LaunchError(
            f"Triton's Python backend needs {library}, and neither {own} nor the linker has it: "
            f"apt-get install libpython{version}, or use a Python built with --enable-shared"
        )
    return ()


def free_port(host: str = "127.0.0.1", taken: Sequence[int] = ()) -> int:
    """A TCP port that nobody uses now, outside the range from which outgoing connections take theirs."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(min(20_000, first - 5_000), first)
    for port in random.sample(candidates, 100):
        if port not in taken and _is_free(host, port):
            return port
    raise LaunchError(f"none of 100 ports between {candidates.start} and {candidates.stop} is free on {host}")


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
        values: dict[str, int] = {}
        for name, port in (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)):
            if port and not _is_free(host, port):
                raise LaunchError(
                    f"port {port} ({name}) on {host} is in use or not permitted; "
                    f"choose another: make serve {name.upper()}_PORT={port + 1000}"
                )
            values[name] = port or free_port(host, list(values.values()))
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
        self._wanted_ports = ports or Ports()
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
        """Starts the server and waits until it is ready."""
        if not self._repository.is_dir():
            raise LaunchError(f"model repository {self._repository} is no folder")
        self.ports = self._wanted_ports.resolved(self._host)
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
        backends = _assemble_backends(self.installation, self.run_dir / "backends")
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


@dataclass(frozen=True)
class RunDirectory:
    """What a server leaves on this machine while it runs: a private folder, and shared memory named after it.

    Attributes:
        path: the folder, mode 0700.
        lock: descriptor of the locked file `lock` in it. The server's processes inherit it, so the lock says whether
            anything of the server lives, even after the launcher was killed.
    """

    path: Path
    lock: int

    @property
    def channel(self) -> Path:
        """Where the models put their sockets."""
        return self.path / "channel"

    @property
    def memory_prefix(self) -> str:
        """How the names of its files in /dev/shm begin."""
        return _memory_prefix(self.path)

    @classmethod
    def create(cls) -> RunDirectory:
        """A new one.

        Raises:
            LaunchError: the folder for temporary files has too long a name.
        """
        path = Path(tempfile.mkdtemp(prefix=f"{_RUN_DIR_PREFIX}{os.getpid()}-"))
        directory = cls(path, _locked_file(path))
        if len(os.fsencode(directory.channel)) > _LONGEST_CHANNEL_PATH:
            directory.remove()
            raise LaunchError(
                f"{directory.channel} is too long for sockets: set TMPDIR to a folder "
                f"whose name is {len(os.fsencode(directory.channel)) - _LONGEST_CHANNEL_PATH} or more bytes shorter"
            )
        directory.channel.mkdir(mode=0o700)
        return directory

    def remove(self) -> None:
        """Removes the folder and the shared memory; more than once does no harm."""
        if self.path.is_dir():
            _remove_traces(self.path)
            os.close(self.lock)


def remove_stale_run_directories() -> list[Path]:
    """Removes what servers of this user left behind that were killed with their launcher. Returns the folders."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{_RUN_DIR_PREFIX}*"):
        with contextlib.suppress(OSError), _stale(path) as stale:
            if stale:
                _remove_traces(path)
                removed.append(path)
    return removed


@contextlib.contextmanager
def _stale(path: Path) -> Iterator[bool]:
    if path.lstat().st_uid != os.getuid():
        yield False
        return
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    finally:
        os.close(descriptor)


def _locked_file(folder: Path) -> int:
    """Creates `lock`; the file is locked before it has that name, so nobody can take the folder for stale."""
    descriptor = os.open(folder / "lock.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(folder / "lock.new", folder / "lock")
    return descriptor


def _memory_prefix(run_dir: Path) -> str:
    return f"{run_dir.name}_shm_region_"


def _remove_traces(run_dir: Path) -> None:
    for region in _SHARED_MEMORY.glob(f"{_memory_prefix(run_dir)}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)


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


def _assemble_backends(installation: Installation, folder: Path) -> Path:
    """A backend directory. Triton refuses libraries behind links out of it, so its own files are copied."""
    python = folder / "python"
    python.mkdir(parents=True)
    for file in installation.python_backend:
        if file.is_file():
            shutil.copy2(file, python / file.name)
    for source in (*installation.other_backends, BACKENDS / "tokenrouter_python"):
        (folder / source.name).unlink(missing_ok=True)
        (folder / source.name).symlink_to(source, target_is_directory=True)
    return folder


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
