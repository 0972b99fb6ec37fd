"""The command: starts everything, greets, supervises, and ends everything."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from tokenrouter.config.roles import role_of
from tokenrouter.errors import ConfigError
from tokenrouter.repository import BACKEND, Repository
from tools.errors import complain, reported
from tools.launch.decisions import Decisions, Limits
from tools.launch.greeting import DEMO_PROMPT, ENTRY, greet
from tools.launch.health import Health
from tools.launch.remote import needed, replicas, wait, with_names
from tools.launch.supervisor import GAVE_UP, Supervisor
from tools.openai_server import OpenAiServer
from tools.tritonserver.installation import find_installation
from tools.tritonserver.ports import Ports, usable_port
from tools.tritonserver.processes import catches
from tools.tritonserver.server import TritonServer

ADMIN_KEY_VARIABLE = "TOKENROUTER_ADMIN_KEY"

console = Console(highlight=False, soft_wrap=True)
app = typer.Typer(add_completion=False)


# Options of tritonserver may stand among ours; it refuses what neither knows.
@app.command(context_settings={"ignore_unknown_options": True})
@reported()
def launch(
    arguments: Annotated[list[str] | None, typer.Argument(help="Further options: passed on to tritonserver.")] = None,
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    supervisor_port: Annotated[int, typer.Option(help="Of /healthz, /readyz, /metrics; 0 takes a free port.")] = 8003,
    openai_port: Annotated[int, typer.Option(help="Of the OpenAI-compatible server; 0 takes a free port.")] = 9000,
    openai: Annotated[bool, typer.Option(help="Whether to start the OpenAI-compatible server.")] = True,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    greeting: Annotated[bool, typer.Option(help="Whether to print a first response.")] = True,
    prompt: Annotated[str, typer.Option(help="Prompt of the first response.")] = DEMO_PROMPT,
    check: Annotated[bool, typer.Option("--check", help="Stop after the first response.")] = False,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until ready.")] = 180.0,
    exit_timeout: Annotated[int, typer.Option(min=0, help="Seconds that running requests get at the end.")] = 10,
    restart_limit: Annotated[int, typer.Option(min=0, help="Events in --restart-window before it gives up.")] = 5,
    restart_window: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 60.0,
    hang_timeout: Annotated[float, typer.Option(min=1, help="Seconds that tritonserver may be silent.")] = 30.0,
    admin_key: Annotated[
        str, typer.Option(envvar=ADMIN_KEY_VARIABLE, help="Opens Triton's restricted APIs; default: nobody knows it.")
    ] = "",
    log_verbose: Annotated[int, typer.Option(help="Triton's own verbosity.")] = 0,
    model_control_mode: Annotated[str, typer.Option(help="none, explicit or poll.")] = "none",
    load_model: Annotated[list[str] | None, typer.Option(help="In explicit mode; may be repeated.")] = None,
    load: Annotated[
        list[str] | None, typer.Option(help="Models of this host, if others serve the rest: --load tokenrouter small.")
    ] = None,
) -> None:
    """Starts tritonserver with our backend, prints how to call it, and keeps it alive until Ctrl-C."""
    stopped = threading.Event()
    limits = Limits(restart_limit, restart_window, load_s=ready_timeout, hang_s=hang_timeout)
    repository = Repository(model_repository)
    names, arguments = with_names(load or (), arguments or (), repository.names())
    if names:
        model_control_mode, load_model = "explicit", names
    loaded = [name for name in load_model or () if name != "*"]
    remote, groups = needed(repository, loaded), replicas(repository, loaded)
    decisions = Decisions(_subservers(repository), limits, model_control_mode != "poll", groups)
    server = TritonServer(
        model_repository,
        ports=Ports(http_port, grpc_port, metrics_port),
        host=host,
        extra_args=[*_control(model_control_mode, load_model or ()), *_verbose(log_verbose), *arguments],
        ready_timeout_s=ready_timeout,
        exit_timeout_s=exit_timeout,
        admin_key=admin_key,
    )
    # Before Triton loads for minutes: a port that is taken is told at once.
    openai_port = usable_port("openai", openai_port, host) if openai else 0
    with closing(Health(host, usable_port("supervisor", supervisor_port, host), decisions.status())) as health:
        supervisor = Supervisor(server, decisions, health, stopped, console, remote=remote)
        _listen(stopped, supervisor, server)
        _start(server, loaded or repository.names(), stopped)
        front = None
        if openai and ENTRY in server.loaded_models():
            front = OpenAiServer(server, model_repository, entry=ENTRY, port=openai_port, host=host)
        connected = partial(wait, needed=remote, replicas=groups, within_s=ready_timeout, stopped=stopped.is_set)
        try:
            code = _serve(supervisor, server, front, health, prompt if greeting else None, connected, check=check)
        except KeyboardInterrupt:  # while everything started again
            code = 0
    raise typer.Exit(code)


def _subservers(repository: Repository) -> set[str]:
    """Models that entry models wait for."""
    found = set()
    for name in repository.names():
        with suppress(ConfigError):
            config = repository.config(name)
            if config.get("backend") == BACKEND and role_of(config) == "subserver":
                found.add(name)
    return found


def _control(mode: str, models: Sequence[str]) -> list[str]:
    """Models are always loaded by name, so that one can be loaded again; without the key clients cannot."""
    if mode == "none":
        mode, models = "explicit", ["*"]
    return [f"--model-control-mode={mode}", *(f"--load-model={name}" for name in models)]


def _verbose(level: int) -> list[str]:
    return [f"--log-verbose={level}"] if level else []


def _listen(stopped: threading.Event, supervisor: Supervisor, server: TritonServer) -> None:
    """SIGINT and SIGTERM end the launcher; SIGUSR1 has it and every model print the stacks of all their threads."""

    def stop(*_: object) -> None:
        stopped.set()
        supervisor.wake()

    def dump(*_: object) -> None:
        faulthandler.dump_traceback(all_threads=True)
        for pid in server.stub_pids().values():
            if catches(pid, signal.SIGUSR1):
                os.kill(pid, signal.SIGUSR1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    signal.signal(signal.SIGUSR1, dump)


def _start(server: TritonServer, expected: Sequence[str], stopped: threading.Event) -> None:
    """Starts Triton and shows what is loading."""
    console.print(f"Triton: {find_installation().origin}", markup=False)
    with console.status("starting") as status:
        server.wait = _progress(status, expected, stopped, server.loaded_models)
        server.start()


def _progress(
    status: Status, expected: Sequence[str], stopped: threading.Event, loaded: Callable[[], list[str]]
) -> Callable[[float], None]:
    """Shows what is still loading, and one line for each model that has been loaded."""
    shown: list[str] = []

    def show(seconds: float) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        now = loaded()
        if len(now) < len(shown):  # another start
            shown.clear()
        for name in now[len(shown) :]:
            shown.append(name)
            console.print(f"  {name} loaded after {seconds:.1f} s", markup=False)
        missing = ", ".join(name for name in expected if name not in shown)
        status.update(f"loading {missing or 'done, opening ports'} ... {seconds:.0f} s")

    return show


def _serve(
    supervisor: Supervisor,
    server: TritonServer,
    front: OpenAiServer | None,
    health: Health,
    prompt: str | None,
    connected: Callable[[str], list[str]],
    *,
    check: bool,
) -> int:
    code = 0
    # The front ends last: it tells its clients what became of their requests.
    with front or nullcontext():
        try:
            code = _greeted(server, front, health, prompt, connected, check=check)
            if not code and not check:
                console.print("\nCtrl-C stops the server. Its log from here on:")
                code = supervisor.run(front)
        finally:
            console.print("stopping")
            exit_code = supervisor.end(at_once=code == GAVE_UP)
    return code or (1 if exit_code else 0)


def _greeted(
    server: TritonServer,
    front: OpenAiServer | None,
    health: Health,
    prompt: str | None,
    connected: Callable[[str], list[str]],
    *,
    check: bool,
) -> int:
    """What the user sees first; the exit code if that does not work."""
    version = f"Triton {server.version()}"
    console.print(f"[bold green]ready[/]: {server.http_url}, gRPC {server.grpc_url}, {server.metrics_url} ({version})")
    console.print(f"[bold green]supervised[/]: {health.url}/readyz")
    if missing := connected(server.metrics_url):
        # It is no fault of this host, and requests wait as long as they may.
        complain(f"models of other hosts are not connected: {', '.join(missing)}; the log says why")
        return 1 if check else 0
    if prompt is not None and ENTRY in server.loaded_models():
        try:
            answered = greet(console, server, front, prompt)
        except (OSError, ValueError, KeyError) as exc:
            complain(f"the first response failed: {exc}")
            return 1
        if not answered and check:
            return 1
    if front is not None:
        front.wait()
        console.print(f"[bold green]ready[/]: OpenAI-compatible server at {front.url}")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    app()
