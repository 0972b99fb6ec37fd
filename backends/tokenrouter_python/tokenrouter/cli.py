"""The command line: `tokenrouter generate "..."`, `explain`, `top`, `timeline`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tokenrouter import __version__
from tokenrouter.errors import InvalidRequest, RouterError
from tokenrouter.targets import fault_of_file

_STYLES = ("green", "magenta", "cyan", "yellow", "blue", "red")

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Token-level LLM routing on NVIDIA Triton.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenrouter {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Token-level LLM routing on NVIDIA Triton."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the response.")] = 256,
    policy: Annotated[str | None, typer.Option(help="Routing policy; default: the deployment's.")] = None,
    policy_params: Annotated[str | None, typer.Option(help="The policy's parameters as JSON.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; default: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the most likely tokens of this mass.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; default: a random one, printed.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they come.")] = False,
    url: Annotated[str, typer.Option(help="Triton's gRPC endpoint.")] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="Name of the entry model.")] = "tokenrouter",
    offline: Annotated[Path | None, typer.Option(help="Run this model repository here, without a server.")] = None,
) -> None:
    """Prints one response, coloured by the model that wrote each token, and who wrote how much."""
    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    given |= {"max_tokens": max_tokens, "policy": policy, "policy_params": policy_params}
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        pieces = _offline(offline, model, prompt, fields) if offline else _server(url, model, prompt, fields)
        _print(pieces, stream=stream)
    except RouterError as exc:
        raise _refused(exc) from exc


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the response, at most 4096.")] = 64,
    policy: Annotated[str | None, typer.Option(help="Routing policy; default: the deployment's.")] = None,
    policy_params: Annotated[str | None, typer.Option(help="The policy's parameters as JSON.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; default: greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; default: a random one, printed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the response's `routing`.")] = False,
    url: Annotated[str, typer.Option(help="Triton's gRPC endpoint.")] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="Name of the entry model.")] = "tokenrouter",
    offline: Annotated[Path | None, typer.Option(help="Run this model repository here, without a server.")] = None,
) -> None:
    """Prints why each token of one response was handed over: what the policy saw beside its threshold."""
    from tokenrouter.explanation import table

    given: dict[str, Any] = {"temperature": temperature, "seed": seed, "policy": policy, "policy_params": policy_params}
    fields = {name: value for name, value in given.items() if value is not None}
    fields |= {"max_tokens": max_tokens, "explain": True}
    texts: list[str] = []
    totals: dict[str, Any] = {}
    try:
        for text, _, _, last in (
            _offline(offline, model, prompt, fields) if offline else _server(url, model, prompt, fields)
        ):
            texts.append(text)
            totals = last or totals
    except RouterError as exc:
        raise _refused(exc) from exc
    if as_json:
        typer.echo(json.dumps(totals))
        return
    console = Console(highlight=False)
    console.print(Text("".join(texts)))
    console.print(table(totals.get("decisions", ())))
    console.print(Text(f"policy {totals.get('policy', '?')}, seed {totals.get('seed', '?')}", style="dim"))


@app.command()
def top(
    metrics_url: Annotated[str, typer.Option(help="Triton's metrics page.")] = "http://127.0.0.1:8002/metrics",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    looks: Annotated[int | None, typer.Option(min=1, help="End after so many looks; default: at Ctrl-C.")] = None,
) -> None:
    """Shows what a server does now: batches, thresholds, KV, hand-offs, queue."""
    from tokenrouter.top import watch

    try:
        watch(metrics_url, interval, looks=looks, console=Console(), sleep=time.sleep)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except RouterError as exc:
        raise _refused(exc) from exc


def _writable(param: typer.CallbackParam, value: Path) -> Path:
    if fault := fault_of_file(value):
        raise _refused(InvalidRequest(f"{param.opts[0]} {value}: {fault}"))
    return value


@app.command()
def timeline(
    seconds: Annotated[float, typer.Option(help="How long to record, at most 60.")] = 10.0,
    output: Annotated[Path, typer.Option(help="File to write.", callback=_writable)] = Path("trace.json"),
    url: Annotated[str, typer.Option(help="Triton's gRPC endpoint.")] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="Name of the entry model.")] = "tokenrouter",
) -> None:
    """Records what a server does, in Chrome's trace format; open the file at ui.perfetto.dev."""
    from tokenrouter.timeline import chrome
    from tokenrouter.timeline.client import record

    try:
        recordings = record(url, seconds, entry=model)
    except RouterError as exc:
        raise _refused(exc) from exc
    chrome.write(recordings, output)
    steps, requests = (sum(map(len, each)) for each in zip(*((r.steps, r.trails) for r in recordings), strict=True))
    dropped = sum(recording.about.dropped for recording in recordings)
    lost = f"; there was no room for {dropped} entries: record for a shorter time" if dropped else ""
    typer.echo(f"{output}: {steps} steps, {requests} requests{lost}")


def _refused(exc: RouterError) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {exc}", style="bold red"))
    return typer.Exit(2)


Piece = tuple[str, str, int, "dict[str, Any] | None"]
"""Text, the model that wrote it, number of tokens, and with the last piece the totals."""


def _server(url: str, model: str, prompt: str, fields: dict[str, Any]) -> Iterator[Piece]:
    from tokenrouter.client import stream as stream_from

    writer = ""
    for chunk in stream_from(url, prompt, model=model, **fields):
        runs = chunk.routing["runs"]
        writer = runs[-1]["model"] if runs else writer
        yield chunk.text, writer, len(chunk.output_ids), chunk.routing if "tokens" in chunk.routing else None


def _offline(repository: Path, model: str, prompt: str, fields: dict[str, Any]) -> Iterator[Piece]:
    """Loads the models now, so that the time measured later is that of generation."""
    from tokenrouter.offline import TokenRouter

    router = TokenRouter.from_repository(repository, entry=model)

    def pieces() -> Iterator[Piece]:
        writer = ""
        with router:
            for update in router.stream(prompt, **fields):
                writer = update.runs[-1].model if update.runs else writer
                totals = None if update.result is None else update.result.totals()
                yield update.text, writer, len(update.tokens), totals

    return pieces()


def _print(pieces: Iterator[Piece], *, stream: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    styles: dict[str, str] = {}
    answer, count, totals = Text(), 0, None
    started = first = time.perf_counter()
    for text, writer, tokens, last in pieces:
        first = first if count else time.perf_counter()
        count += tokens
        totals = last or totals
        style = styles.setdefault(writer, _STYLES[len(styles) % len(_STYLES)])
        if stream:
            console.print(Text(text, style=style), end="")
            sys.stdout.flush()
        else:
            answer.append(text, style=Style.parse(style))
    now = time.perf_counter()
    console.print(answer if not stream else "")
    console.print(_summary(totals or {}, styles, count, first - started, now - started))


def _summary(totals: dict[str, Any], styles: dict[str, str], count: int, first_s: float, took_s: float) -> Text:
    line = Text()
    for model, tokens in totals.get("tokens", {}).items():
        line.append(f"{model} {tokens}", style=styles.get(model, "dim")).append(" tokens, ")
    line.append(
        f"{totals.get('handoffs', 0)} hand-offs, {count / took_s:.1f} tokens/s, first token {first_s * 1e3:.0f} ms"
    )
    if totals.get("emulated"):
        line.append(", emulated engine", style="bold")
    return line.append(f" (policy {totals.get('policy', '?')}, seed {totals.get('seed', '?')})", style="dim")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
