"""`python -m perf.openai`: what the OpenAI-compatible server costs beside a direct gRPC stream, in one run.

The same prompts with the same seeds run in a closed loop, in windows that alternate between the two ways in. Tokens are
counted by the server; the time to the first token by the client, from the request to the first bytes of an answer.
CPU seconds per 1,000 tokens are those of every process; the load generator is one of them, and does as little as it can
with what it receives: it looks at the bytes of every message, and decodes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeAlias

import psutil
import typer

from perf.command import run
from perf.load.event_loop import EventLoop
from perf.rows import Columns, Row, report, shown, table
from perf.serving.window import cpu_seconds
from tokenrouter.metrics_page import fresh_scrape
from tools.load import ClosedLoop, read_prompts, request_bytes
from tools.openai_server import OpenAiServer
from tools.progress import LateProgress
from tools.tritonserver.server import TritonServer
from tools.tune.measure import WARM_UP_S, rate

ENTRY = "tokenrouter"
_FRONT = "/v1"
_PROCESSES = {"load": "load", "/v1": _FRONT, "tritonserver": "tritonserver", "orchestrator": ENTRY}
_COLUMNS: Columns = {
    "way in": ("way", ""),
    "tokens/s": ("tokens_per_second", ".0f"),
    "of direct": ("ratio", ".3f"),
    "first token ms": ("first_token_ms", ".1f"),
    "later ms": ("later_ms", "+.1f"),
    **{f"CPU {heading}": (f"cpu_s_per_1000_tokens.{name}", ".3f") for heading, name in _PROCESSES.items()},
    "CPU small": ("cpu_s_per_1000_tokens.small", ".3f"),
    "CPU large": ("cpu_s_per_1000_tokens.large", ".3f"),
    "CPU all": ("cpu_s_per_1000_tokens", ".3f"),
}
Figures: TypeAlias = dict[str, float]
Load: TypeAlias = AbstractContextManager[Any]


class Ways:
    """Loads on both ways in, and how long their first tokens took.

    Args:
        server: whose endpoint is called directly.
        port: of the OpenAI-compatible server in front of it.
        in_flight: responses that run at once.
        max_tokens: of a response.
    """

    def __init__(self, server: TritonServer, port: int, in_flight: int, max_tokens: int) -> None:
        self._server, self._port, self._in_flight, self._max_tokens = server, port, in_flight, max_tokens
        self._prompts = read_prompts()
        self.loads: dict[str, Callable[[], Load]] = {"direct": self._direct, _FRONT: self._front}

    def _prompt(self, number: int) -> str:
        return self._prompts[number % len(self._prompts)]

    def _direct(self) -> ClosedLoop:
        def request(number: int) -> bytes:
            limit, name = self._max_tokens, str(number)
            return request_bytes(ENTRY, self._prompt(number), max_tokens=limit, seed=number, request_id=name)

        return ClosedLoop(self._server.grpc_url, request, self._in_flight, keep=True)

    def _front(self) -> EventLoop:
        def body(number: int) -> Mapping[str, Any]:
            fields = {"max_tokens": self._max_tokens, "seed": number, "temperature": 0}
            return {"model": ENTRY, "prompt": self._prompt(number), **fields}

        return EventLoop(self._port, body, self._in_flight)


def first_tokens_s(load: Load) -> list[float]:
    """From the request to the first message of its answer, of every request."""
    if isinstance(load, EventLoop):
        return load.first_token_s
    assert isinstance(load, ClosedLoop)
    first: dict[int, float] = {}
    for number, at_s, _ in load.messages():
        first.setdefault(number, at_s - load.sent_s[number])
    return list(first.values())


def window(server: TritonServer, front: OpenAiServer, begin: Callable[[], Load], seconds: float) -> Figures:
    """One window of one way: tokens per second, ms to the first token, CPU seconds per 1,000 tokens by process."""

    def cpu() -> dict[str, float]:
        times = psutil.Process(front.pid).cpu_times()
        return {**cpu_seconds(server), _FRONT: times.user + times.system}

    with begin() as load:
        time.sleep(WARM_UP_S)
        before, cpu_before = fresh_scrape(server.metrics_url, ENTRY), cpu()
        time.sleep(seconds)
        after, cpu_after = fresh_scrape(server.metrics_url, ENTRY), cpu()
    thousands = 1e-3 * after.since(before).value("tokenrouter_tokens", model=ENTRY)
    spent = {name: (cpu_after[name] - cpu_before[name]) / thousands for name in cpu_before}
    return {
        "tokens_per_second": rate(before, after, ENTRY),
        "first_token_ms": 1e3 * median(first_tokens_s(load)),
        **{f"cpu_s_per_1000_tokens.{name}": cpu_s for name, cpu_s in spent.items()},
        "cpu_s_per_1000_tokens": sum(spent.values()),
    }


def rows(found: Mapping[str, Sequence[Figures]]) -> list[Row]:
    """Medians over the windows of each way; the ratio and the delay are those of neighbouring windows."""

    def middle(way: str) -> Figures:
        return {name: median(figures[name] for figures in found[way]) for name in found[way][0]}

    pairs = list(zip(found[_FRONT], found["direct"], strict=True))
    beside = {
        "ratio": median(ours["tokens_per_second"] / direct["tokens_per_second"] for ours, direct in pairs),
        "later_ms": median(ours["first_token_ms"] - direct["first_token_ms"] for ours, direct in pairs),
    }
    return [{"way": "direct", **middle("direct")}, {"way": _FRONT, **middle(_FRONT), **beside}]


def main(
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    inflight: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a response.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of a window.")] = 5.0,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each way.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    found: dict[str, list[Figures]] = {"direct": [], _FRONT: []}
    with (
        LateProgress() as progress,
        TritonServer(model_repository) as server,
        OpenAiServer(server, model_repository) as front,
    ):
        front.wait()
        ways = Ways(server, front.port, inflight, max_tokens)
        for done in range(windows):
            progress("measuring", done / windows)
            for way, begin in ways.loads.items():
                found[way].append(window(server, front, begin, seconds))
    result = rows(found)
    report(result, table(shown(row, _COLUMNS) for row in result), as_json=as_json)


if __name__ == "__main__":
    run(main)
