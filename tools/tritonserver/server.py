"""One `tritonserver`: started, watched until it is ready, stopped without leaving anything behind."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from pathlib import Path
from types import TracebackType

from tokenrouter import telemetry
from tokenrouter.channel.unix import RUNTIME_DIR_VARIABLE
from tokenrouter.direct_http import http_open, is_ok
from tokenrouter.errors import ConfigError
from tokenrouter.repository import Repository
from tools.tritonserver import log
from tools.tritonserver.installation import Installation, LaunchError, assemble_backends, find_installation
from tools.tritonserver.ports import Ports
from tools.tritonserver.processes import Processes
from tools.tritonserver.repository_api import HEADER, RESTRICTED, RepositoryApi
from tools.tritonserver.run_directory import RunDirectory, remove_stale_run_directories

_STARTS = 3
_LOCK_LOST = "boost::interprocess::lock_exception"
_POLL_S = 0.1
# What models get beyond the time for requests, to end responses that are cut short; and what the server gets to unload
# them. It ends as soon as it has; on a busy machine that takes a while.
_ANSWER_S = 5
_WIND_UP_S = 20
_KILL_S = 5.0


@dataclass(eq=False)
class TritonServer:
    """One running server; a context manager that starts it, waits until it is ready, and leaves nothing behind.

    The models' Python processes search modules in the caller's working directory first (so a policy may lie there).
    The server gets SIGTERM when the *thread* that called `start` ends, however it ends: start it from one that stays.

    Attributes:
        repository: the model repository.
        ports: see `Ports`; after `start`, where it listens.
        host: address to listen on.
        env: added to the server's environment.
        extra_args: further arguments of tritonserver.
        ready_timeout_s: how long `start` waits.
        exit_timeout_s: how long running requests may take when it stops; those that take longer end with an error.
        admin_key: opens Triton's restricted APIs (`repository_api.RESTRICTED`); a new one for every start if empty.
        wait: called about ten times a second while it starts, for progress; gets the seconds so far.
    """

    repository: str | Path
    _: KW_ONLY
    ports: Ports = field(default_factory=Ports)
    host: str = "127.0.0.1"
    env: Mapping[str, str] = field(default_factory=dict)
    extra_args: Sequence[str] = ()
    ready_timeout_s: float = 120.0
    exit_timeout_s: int = 10
    admin_key: str = ""
    wait: Callable[[float], None] = lambda seconds: None
    _processes: Processes | None = field(init=False, default=None)
    _run_dir: RunDirectory | None = field(init=False, default=None)
    _log: str = field(init=False, default="")
    _key: str = field(init=False, default="")

    # --- what callers ask -----------------------------------------------------------------------------------------

    @property
    def http_url(self) -> str:
        return f"http://{self._address}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """host:port."""
        return f"{self._address}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """Of the metrics page."""
        return f"http://{self._address}:{self.ports.metrics}/metrics"

    @property
    def _address(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    @property
    def pid(self) -> int:
        """Of tritonserver."""
        assert self._processes is not None
        return self._processes.pid

    @property
    def run_dir(self) -> Path:
        """The private directory of this server; removed by `stop`."""
        assert self._run_dir is not None
        return self._run_dir.path

    @property
    def log_path(self) -> Path:
        """The server's log; goes with the run directory."""
        return self.run_dir / "log"

    @property
    def admin_headers(self) -> dict[str, str]:
        """What opens the restricted APIs over HTTP."""
        return {HEADER: self._key}

    def repository_api(self) -> RepositoryApi:
        """Loads and unloads models, if the server runs with `--model-control-mode=explicit`."""
        return RepositoryApi(self.http_url, self._key)

    def is_live(self, *, timeout_s: float) -> bool:
        """Whether tritonserver answers at all."""
        return self._answers("live", timeout_s)

    def stub_pids(self) -> dict[str, int]:
        """Process ids of the models' living Python processes, by model."""
        return {} if self._processes is None else self._processes.stubs()

    def lost_models(self, *, timeout_s: float) -> list[str]:
        """Models that Triton believes to be ready although their Python process is gone.

        One that is being unloaded right now may be among them.

        Raises:
            OSError: the server does not answer.
        """
        states = self.repository_api().states(timeout_s=timeout_s)
        alive = self.stub_pids()  # after the states: a model that is ready has had its process by now
        gone = [name for name, state in states.items() if state == "READY" and name not in alive]
        return [name for name in gone if self._is_python(name)]

    def _is_python(self, model: str) -> bool:
        """Whether a model runs in a Python process: of the backend `python`, or of one that is written in Python."""
        try:
            backend = str(Repository(self.repository).config(model).get("backend", ""))
        except ConfigError:
            return False
        return backend == "python" or (self.run_dir / "backends" / backend / "model.py").is_file()

    def log_text(self) -> str:
        """Everything the server has logged so far."""
        if self._run_dir is not None and self.log_path.is_file():
            self._log = self.log_path.read_text("utf-8", "replace")
        return self._log

    def loaded_models(self) -> list[str]:
        """Models that have been loaded so far, in the order of the log."""
        return log.loaded_models(self.log_text())

    def version(self) -> str:
        """Triton's version, asked from the running server."""
        with http_open(f"{self.http_url}/v2", timeout=5) as response:
            return str(json.load(response)["version"])

    def is_running(self) -> bool:
        return self._processes is not None and self._processes.is_running()

    # --- life cycle -----------------------------------------------------------------------------------------------

    def start(self) -> TritonServer:
        """Starts the server and waits until it is ready.

        Raises:
            LaunchError: with the failing model's own error, if there is one.
        """
        if not Path(self.repository).is_dir():
            raise LaunchError(f"model repository {Path(self.repository).resolve()} is no folder")
        self.ports = self.ports.resolved(self.host)
        installation = find_installation()
        remove_stale_run_directories()
        self._run_dir = RunDirectory.create()
        self._key = self.admin_key or secrets.token_hex(16)
        try:
            self._run(installation, self._run_dir, starts=_STARTS)
        except BaseException:
            self.kill()  # nobody's request runs yet
            raise
        return self

    def _run(self, installation: Installation, run_dir: RunDirectory, *, starts: int) -> None:
        """Starts the processes and waits until they are ready; again, `starts` times in all, if Triton aborts."""
        self._processes = self._spawn(installation, run_dir)
        try:
            self._wait_until_ready(self._processes)
        except LaunchError:
            if starts == 1 or not self._aborted(self._processes):
                raise
            self._processes.end(0.0)
            self._run(installation, run_dir, starts=starts - 1)

    def _aborted(self, processes: Processes) -> bool:
        """Whether Triton gave up a lock that it shares with a model's process.

        Seen with Triton 2.51 in two of about forty starts of a busy test run; why is not known.
        """
        return not processes.is_running() and _LOCK_LOST in self.log_text()

    def stop(self, *, hangs: bool = False) -> int | None:
        """SIGTERM: running requests get their time. In the end SIGKILL; removes what is left.

        Args:
            hangs: see `Processes.end`.

        Returns:
            The server's exit code; None if it never ran.
        """
        if self._run_dir is not None:
            self._run_dir.announce_end(self.exit_timeout_s)
        patience_s = self.exit_timeout_s + _WIND_UP_S + _KILL_S
        return self._end(patience_s, hangs=hangs, cut_after_s=self.exit_timeout_s + _ANSWER_S)

    def kill_orphans(self) -> None:
        """Ends what is left of models whose processes died."""
        if self._processes is not None:
            self._processes.kill_orphans()

    def kill(self) -> int | None:
        """Ends the server with all its processes at once, and removes what is left. Returns the exit code."""
        return self._end(0.0)

    def _end(self, patience_s: float, *, hangs: bool = False, cut_after_s: float = inf) -> int | None:
        code = None
        if self._processes is not None:
            ports = (self.ports.http, self.ports.grpc)
            code = self._processes.end(patience_s, hangs=hangs, cut_after_s=cut_after_s, ports=ports)
        self.log_text()
        if self._run_dir is not None:
            self._run_dir.remove()
        return code

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, installation: Installation, run_dir: RunDirectory) -> Processes:
        backends = assemble_backends(installation, run_dir.path / "backends")
        command = [str(installation.binary), *self._options(backends, run_dir), *self.extra_args]
        with self.log_path.open("ab") as output:
            # The lock of the run directory stays taken while anything of the server lives.
            environment = self._environment(installation, run_dir)
            return Processes(command, environment, output, keep=run_dir.lock, mark=RUNTIME_DIR_VARIABLE)

    def _options(self, backends: Path, run_dir: RunDirectory) -> list[str]:
        addresses = [f"--{kind}-address={self.host}" for kind in ("http", "grpc", "metrics")]
        return [
            f"--model-repository={Path(self.repository).resolve()}",
            f"--backend-directory={backends}",
            # The key "python" takes effect for Python-based backends too; a key with our backend's own name does not.
            f"--backend-config=python,shm-region-prefix-name={run_dir.memory_prefix}",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={self.exit_timeout_s + _WIND_UP_S}",
            *self._forwarding(),
            f"--http-restricted-api={RESTRICTED}:{HEADER}={self._key}",
            f"--grpc-restricted-protocol={RESTRICTED}:{HEADER}={self._key}",
            *addresses,
            *(f"--{kind}-port={port}" for kind, port in vars(self.ports).items()),
        ]

    def _forwarding(self) -> list[str]:
        """Headers of a trace reach the models only where spans are exported."""
        if not telemetry.configured({**os.environ, **self.env}):
            return []
        pattern = f"(?i)^({'|'.join(telemetry.HEADERS)})$"
        return [f"--{kind}-header-forward-pattern={pattern}" for kind in ("http", "grpc")]

    def _environment(self, installation: Installation, run_dir: RunDirectory) -> dict[str, str]:
        env = {"HF_HUB_OFFLINE": "1", **os.environ, RUNTIME_DIR_VARIABLE: str(run_dir.channel)}
        env["TOKENROUTER_EXIT_TIMEOUT_S"] = str(self.exit_timeout_s + _ANSWER_S)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        if installation.libraries:
            paths = [*map(str, installation.libraries), env.get("LD_LIBRARY_PATH", "")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        return {**env, **self.env}

    def _wait_until_ready(self, processes: Processes) -> None:
        started = time.monotonic()
        while not self._answers("ready", timeout_s=2):
            elapsed = time.monotonic() - started
            if not processes.is_running():
                raise LaunchError(log.explanation(self.log_text(), "tritonserver ended before it was ready"))
            if elapsed > self.ready_timeout_s:
                raise LaunchError(log.explanation(self.log_text(), f"not ready after {self.ready_timeout_s:g} s"))
            self.wait(elapsed)
            time.sleep(_POLL_S)
        self.wait(time.monotonic() - started)

    def _answers(self, question: str, timeout_s: float) -> bool:
        return is_ok(f"{self.http_url}/v2/health/{question}", timeout_s)
