"""`python -m tools.launch`, what `make serve` calls: serves a model repository until Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request

import typer
from rich.console import Console
from rich.status import Status

from tokenrouter.direct_http import http_open
from tokenrouter.repository import Repository
from tools.errors import complain, reported
from tools.openai_server import OpenAiServer
from tools.tritonserver.installation import find_installation
from tools.tritonserver.ports import Ports, usable_port
from tools.tritonserver.server import TritonServer

ENTRY = "tokenrouter"
DEMO_PROMPT = "Start 91: -38, *2, -47 ="
# Of the first response and of the calls that are shown: the first that fits the models' contexts.
_MAX_TOKENS = (160, 40, 10, 1)
_LOG_LIMIT = 64 << 20
_POLL_S = 0.25

console = Console(highlight=False, soft_wrap=True)


@reported()
def launch(
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: passed on to tritonserver.")] = None,
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    openai_port: Annotated[int, typer.Option(help="Of the OpenAI-compatible server; 0 takes a free port.")] = 9000,
    openai: Annotated[bool, typer.Option(help="Whether to start the OpenAI-compatible server.")] = True,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    prompt: Annotated[str, typer.Option(help="Prompt of the first response.")] = DEMO_PROMPT,
    check: Annotated[bool, typer.Option("--check", help="Stop after the first response.")] = False,
    ready_timeout: Annotated[float, typer.Option(help="Seconds to wait until ready.")] = 180.0,
    exit_timeout: Annotated[int, typer.Option(help="Seconds that running requests get at the end.")] = 10,
    log_verbose: Annotated[int, typer.Option(help="Triton's own verbosity.")] = 0,
    model_control_mode: Annotated[str, typer.Option(help="none, explicit or poll.")] = "none",
    load_model: Annotated[list[str] | None, typer.Option(help="In explicit mode; may be repeated.")] = None,
) -> None:
    """Starts tritonserver with our backend, waits until it is ready, and prints how to call it."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    extra = [f"--model-control-mode={model_control_mode}", *(f"--load-model={name}" for name in load_model or ())]
    if log_verbose:
        extra.append(f"--log-verbose={log_verbose}")
    with console.status("starting") as status:
        server = TritonServer(
            model_repository,
            ports=Ports(http_port, grpc_port, metrics_port),
            host=host,
            extra_args=[*extra, *(arguments or ())],
            ready_timeout_s=ready_timeout,
            exit_timeout_s=exit_timeout,
            wait=_progress(status, model_repository, stopped, lambda: server.loaded_models()),
        )
        front = _start(server, model_repository, openai_port if openai else None, host)
    try:
        with front or nullcontext():
            code = _serve(server, front, prompt, stopped, check=check)
    finally:
        console.print("stopping")
        exit_code = server.stop()
    raise typer.Exit(code or (1 if exit_code else 0))


def _start(server: TritonServer, repository: Path, openai_port: int | None, host: str) -> OpenAiServer | None:
    """Starts Triton; the OpenAI-compatible server that is to be started in front of it, if there is an entry model."""
    # Before Triton loads for minutes: a port that is taken is told at once.
    port = None if openai_port is None else usable_port("openai", openai_port, host)
    console.print(f"Triton: {find_installation().origin}", markup=False)
    server.start()
    if port is None or ENTRY not in server.loaded_models():
        return None
    return OpenAiServer(server, repository, entry=ENTRY, port=port, host=host)


def _progress(
    status: Status, repository: Path, stopped: threading.Event, loaded: Callable[[], list[str]]
) -> Callable[[float], None]:
    """Shows what is still loading, and one line for each model that has been loaded."""
    expected = Repository(repository).names()
    shown: list[str] = []

    def show(seconds: float) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        for name in loaded()[len(shown) :]:
            shown.append(name)
            console.print(f"  {name} loaded after {seconds:.1f} s", markup=False)
        missing = ", ".join(name for name in expected if name not in shown)
        status.update(f"loading {missing or 'done, opening ports'} ... {seconds:.0f} s")

    return show


def _serve(
    server: TritonServer, front: OpenAiServer | None, prompt: str, stopped: threading.Event, *, check: bool
) -> int:
    version = f"Triton {server.version()}"
    console.print(f"[bold green]ready[/]: {server.http_url}, gRPC {server.grpc_url}, {server.metrics_url} ({version})")
    if ENTRY in server.loaded_models():
        try:
            max_tokens, answer = first_response(partial(_generate, server), prompt)
        except Refused as exc:
            # The server is well, and other prompts may fit.
            complain(f"the first response was refused: {exc}; give another --prompt")
            if check:
                return 1
            max_tokens, answer = _MAX_TOKENS[-1], None
        except (OSError, ValueError, KeyError) as exc:
            complain(f"the first response failed: {exc}")
            return 1
        _print_usage(server, front, prompt, max_tokens)
        if answer is not None:
            _print_response(prompt, answer)
        if front is not None:
            front.wait()
            console.print(f"[bold green]ready[/]: OpenAI-compatible server at {front.url}")
    if check:
        return 0
    console.print("\nCtrl-C stops the server. Its log from here on:")
    return _follow(server, front, stopped)


def _follow(server: TritonServer, front: OpenAiServer | None, stopped: threading.Event) -> int:
    """Copies the log to the console until somebody stops us or the server ends."""
    with server.log_path.open("r+b") as log:
        log.seek(0, 2)
        while not stopped.wait(_POLL_S):
            running = server.is_running()
            sys.stdout.write(log.read().decode("utf-8", "replace"))
            if not running or (front is not None and not front.is_running()):
                name = "the OpenAI-compatible server" if running else "tritonserver"
                complain(f"{name} has ended by itself")
                return 1
            if log.tell() > _LOG_LIMIT:
                # The server appends, so it goes on at the start; lines written in between are lost here only.
                log.seek(0)
                log.truncate()
    return 0


def _print_usage(server: TritonServer, front: OpenAiServer | None, prompt: str, max_tokens: int) -> None:
    url = f"{server.http_url}/v2/models/{ENTRY}"
    fields = {"text_input": prompt, "max_tokens": max_tokens}
    binaries = Path(sys.executable).parent
    if binaries.is_relative_to(Path.cwd()):
        binaries = binaries.relative_to(Path.cwd())
    console.print("\nCall it:", style="bold")
    for line in (
        f"curl -s {url}/generate -d '{json.dumps(fields)}'",
        f"curl -sN {url}/generate_stream -d '{json.dumps({**fields, 'stream': True})}'",
        f'{binaries}/tokenrouter generate "{prompt}" --stream --url {server.grpc_url}',
        *_python_call(server.grpc_url, prompt, max_tokens),
        *([] if front is None else _openai_call(front.url, prompt)),
    ):
        console.print(f"  {line}", markup=False)
    console.print()


def _python_call(grpc_url: str, prompt: str, max_tokens: int) -> list[str]:
    return [
        "Python over gRPC:",
        "  from tokenrouter.client import stream",
        f"  for chunk in stream({grpc_url!r}, {prompt!r}, max_tokens={max_tokens}):",
        '      print(chunk.text, end="", flush=True)',
    ]


def _openai_call(url: str, prompt: str) -> list[str]:
    body = {"model": ENTRY, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    return [
        "OpenAI clients:",
        f"  curl -s {url}/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
    ]


def first_response(generate: Callable[[dict[str, Any]], dict[str, Any]], prompt: str) -> tuple[int, dict[str, Any]]:
    """As many tokens as fit, and the answer. Raises what the last `generate` raises."""
    for max_tokens in _MAX_TOKENS:
        fields = {"text_input": prompt, "max_tokens": max_tokens}
        try:
            return max_tokens, generate({**fields, "exclude_input_in_output": True, "return_routing": True})
        except Refused as exc:
            refused = exc
    raise refused


def _print_response(prompt: str, answer: dict[str, Any]) -> None:
    routing = json.loads(answer["routing"])
    console.print("A routed response:", style="bold")
    console.print(f"{prompt}{answer['text_output']}", markup=False)
    written = ", ".join(f"{model} wrote {count} tokens" for model, count in routing["tokens"].items())
    console.print(f"({written}, {routing['handoffs']} hand-offs, finish reason {answer['finish_reason']})", style="dim")


class Refused(ValueError):
    """The server answered that it cannot serve this request."""


def _generate(server: TritonServer, fields: dict[str, Any]) -> dict[str, Any]:
    url = f"{server.http_url}/v2/models/{ENTRY}/generate"
    request = Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    try:
        with http_open(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
    except HTTPError as exc:
        kind = Refused if exc.code == HTTPStatus.BAD_REQUEST else ValueError
        raise kind(exc.read().decode("utf-8", "replace")) from exc
    return answer


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    typer.run(launch)
