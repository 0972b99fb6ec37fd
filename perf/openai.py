"""`python -m perf.openai`: what the OpenAI-compatible server costs beside a direct gRPC stream, in one run.

The same prompts with the same seeds run in a closed loop, in windows that alternate between the two ways in. Tokens are
counted by the server; the time to the first token by the client, from the request to the first bytes of an answer.
Both loads do as little as they can with what they receive.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tokenrouter.metrics_page import fresh_scrape
from tools.errors import reported
from tools.load import ClosedLoop, read_prompts, request_bytes
from tools.openai_server import OpenAiServer
from tools.progress import LateProgress
from tools.tritonserver.server import TritonServer
from tools.tune.measure import WARM_UP_S, rate


class Chats:
    """A closed loop of streamed completions in a thread of its own; a context manager.

    Attributes:
        first_token_s: of every request that got one.
    """

    def __init__(self, port: int, body: Callable[[int], dict[str, Any]], in_flight: int) -> None:
        self._port, self._body, self._in_flight = port, body, in_flight
        self._number = 0
        self.first_token_s: list[float] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Chats:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(self._client()) for _ in range(self._in_flight)]
        while not self._stopping.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self) -> None:
        while True:
            number, self._number = self._number, self._number + 1
            await self._request(json.dumps(self._body(number)).encode())

    async def _request(self, body: bytes) -> None:
        sent = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"data: ")
        self.first_token_s.append(time.perf_counter() - sent)
        while await reader.read(1 << 16):
            pass
        writer.close()


def _first_tokens(loop: ClosedLoop) -> list[float]:
    first: dict[int, float] = {}
    for number, at_s, _ in loop.messages():
        first.setdefault(number, at_s - loop.sent_s[number])
    return list(first.values())


def measure(
    repository: Path, in_flight: int, max_tokens: int, seconds: float, windows: int, report: LateProgress
) -> dict[str, Any]:
    """Medians over the windows: tokens per second and ms to the first token, direct and through `/v1`."""
    prompts = read_prompts()

    def body(number: int) -> dict[str, Any]:
        fields = {"model": "tokenrouter", "prompt": prompts[number % len(prompts)], "max_tokens": max_tokens}
        return {**fields, "seed": number, "temperature": 0, "stream": True}

    def direct(number: int) -> bytes:
        prompt = prompts[number % len(prompts)]
        return request_bytes("tokenrouter", prompt, max_tokens=max_tokens, seed=number, request_id=str(number))

    rates: dict[str, list[float]] = {"direct": [], "openai": []}
    firsts: dict[str, list[float]] = {"direct": [], "openai": []}
    with TritonServer(repository) as server, OpenAiServer(server, repository) as openai:
        openai.wait()

        def window() -> float:
            time.sleep(WARM_UP_S)
            before = fresh_scrape(server.metrics_url, "tokenrouter")
            time.sleep(seconds)
            return rate(before, fresh_scrape(server.metrics_url, "tokenrouter"), "tokenrouter")

        for done in range(windows):
            report("measuring", done / windows)
            with ClosedLoop(server.grpc_url, direct, in_flight, keep=True) as loop:
                rates["direct"].append(window())
            firsts["direct"].append(median(_first_tokens(loop)) * 1e3)
            with Chats(openai.port, body, in_flight) as chats:
                rates["openai"].append(window())
            firsts["openai"].append(median(chats.first_token_s) * 1e3)
    result: dict[str, Any] = {"inflight": in_flight}
    for way in rates:
        result[f"{way}_tokens_per_second"] = round(median(rates[way]), 1)
        result[f"{way}_first_token_ms"] = round(median(firsts[way]), 2)
    ratios = [ours / direct for ours, direct in zip(rates["openai"], rates["direct"], strict=True)]
    result["ratio"] = round(median(ratios), 3)
    return result


@reported()
def main(
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    inflight: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a response.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of a window.")] = 5.0,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each way.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures both ways in."""
    with LateProgress() as report:
        result = measure(model_repository, inflight, max_tokens, seconds, windows, report)
    print(json.dumps(result) if as_json else "\n".join(f"{name:26} {value}" for name, value in result.items()))


if __name__ == "__main__":
    typer.run(main)
