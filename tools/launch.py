"""`python -m tools.launch`, what `make serve` calls: serves a model repository until Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer
from rich.console import Console
from rich.status import Status

from tools.tritonserver import LaunchError, Ports, TritonServer, find_installation

ENTRY = "tokenrouter"
DEMO_PROMPT = "Start 91: -38, *2, -47 ="

console = Console(highlight=False, soft_wrap=True)


def launch(
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    prompt: Annotated[str, typer.Option(help="Prompt of the first response.")] = DEMO_PROMPT,
    check: Annotated[bool, typer.Option("--check", help="Stop after the first response.")] = False,
    ready_timeout: Annotated[float, typer.Option(help="Seconds to wait until ready.")] = 180.0,
    exit_timeout: Annotated[int, typer.Option(help="Seconds that running requests get at the end.")] = 10,
    log_verbose: Annotated[int, typer.Option(help="Triton's own verbosity.")] = 0,
    triton_arg: Annotated[list[str] | None, typer.Option(help="Passed on to tritonserver; may be repeated.")] = None,
) -> None:
    """Starts tritonserver with our backend, waits until it is ready, and prints how to call it."""
    extra = [*(triton_arg or []), *([f"--log-verbose={log_verbose}"] if log_verbose else [])]
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _interrupt(stopped))
    try:
        console.print(f"Triton: {find_installation().origin}")
        with console.status("starting") as status:
            server = TritonServer(
                model_repository,
                ports=Ports(http_port, grpc_port, metrics_port),
                host=host,
                extra_args=extra,
                ready_timeout_s=ready_timeout,
                exit_timeout_s=exit_timeout,
                wait=_progress(status, model_repository, stopped),
            ).start()
    except LaunchError as exc:
        console.print(f"[bold red]error:[/] {exc}", markup=True)
        raise typer.Exit(1) from exc
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    try:
        code = _serve(server, prompt, stopped, check=check)
    finally:
        console.print("stopping")
        server.stop()
    raise typer.Exit(code)


def _interrupt(stopped: threading.Event) -> None:
    stopped.set()


def _progress(status: Status, repository: Path, stopped: threading.Event) -> Callable[[float], None]:
    names = ", ".join(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))

    def show(seconds: float) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        status.update(f"loading {names} ... {seconds:.0f} s")

    return show


def _serve(server: TritonServer, prompt: str, stopped: threading.Event, *, check: bool) -> int:
    console.print(f"[bold green]ready[/]: {server.http_url}, gRPC {server.grpc_url}, {server.metrics_url}")
    if "tokenrouter" in server.stub_pids():
        _print_usage(server, prompt)
        try:
            _print_response(server, prompt)
        except (OSError, ValueError) as exc:
            console.print(f"[bold red]error:[/] the first response failed: {exc}")
            return 1
    if check:
        return 0
    console.print("Ctrl-C stops the server.")
    while not stopped.wait(0.5):
        if not server.is_running():
            console.print("[bold red]error:[/] tritonserver ended:\n" + "\n".join(server.log_text().splitlines()[-15:]))
            return 1
    return 0


def _print_usage(server: TritonServer, prompt: str) -> None:
    url = f"{server.http_url}/v2/models/{ENTRY}"
    fields = json.dumps({"text_input": prompt, "max_tokens": 160})
    streamed = json.dumps({"text_input": prompt, "max_tokens": 160, "stream": True})
    console.print("\nCall it:", style="bold")
    console.print(f"  curl -s {url}/generate -d '{fields}'", markup=False)
    console.print(f"  curl -sN {url}/generate_stream -d '{streamed}'", markup=False)
    command = f'.venv/bin/tokenrouter generate "{prompt}" --stream --url {server.grpc_url}'
    console.print(f"  {command}", markup=False)
    console.print("  Python over gRPC: see README.md\n")


def _print_response(server: TritonServer, prompt: str) -> None:
    answer = _generate(
        f"{server.http_url}/v2/models/{ENTRY}/generate",
        {"text_input": prompt, "max_tokens": 160, "exclude_input_in_output": True, "return_routing": True},
    )
    routing = json.loads(answer["routing"])
    console.print("A routed response:", style="bold")
    console.print(f"{prompt}{answer['text_output']}", markup=False)
    written = ", ".join(f"{model} wrote {count} tokens" for model, count in routing["tokens"].items())
    console.print(f"({written}, {routing['handoffs']} hand-offs, finish reason {answer['finish_reason']})", style="dim")


def _generate(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    request = Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
    except HTTPError as exc:
        raise ValueError(exc.read().decode("utf-8", "replace")) from exc
    return answer


def main() -> None:
    """Entry point."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    typer.run(launch)


if __name__ == "__main__":
    main()
