"""`python -m perf.micro.handoff`: what a hand-off costs, through the real server, with an idle peer.

Two emulated models (steps of 1 ms) write alternate tokens of one request at a time, so the target is always idle. The
time is from the end of the step at one subserver to *ready* at the other, as the subservers measure it.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.emulated.repository import write_emulated_repository
from tokenrouter.metrics_page import Scrape, scrape
from tools.load import ClosedLoop, LoadError, request_bytes
from tools.tritonserver.server import TritonServer

_NAME = "tokenrouter_handoff_seconds"
_LONGEST_S = 120.0


def measure(tokens: int, step_ms: float) -> dict[str, float]:
    """Hand-off times in ms: p50, p90, p99 and mean, and how many there were."""
    entry = {"policy": "scripted", "policy_params": {"writers": ["small", "large"], "trigger": "keep"}}
    with tempfile.TemporaryDirectory() as folder:
        repository = write_emulated_repository(Path(folder), step_ms={"small": step_ms, "large": step_ms}, entry=entry)
        with TritonServer(repository) as server:
            _generate(server.grpc_url, 200)
            before = _settled(server.metrics_url)
            _generate(server.grpc_url, tokens)
            spent = _settled(server.metrics_url).since(before)
    quantiles = {f"p{round(q * 100)}_ms": spent.quantile(_NAME, q) * 1e3 for q in (0.5, 0.9, 0.99)}
    return {**quantiles, "mean_ms": spent.mean(_NAME) * 1e3, "handoffs": spent.value(f"{_NAME}_count")}


def _generate(url: str, tokens: int) -> None:
    """One response, from beginning to end."""
    request = request_bytes("tokenrouter", "abcdefgh", max_tokens=tokens)
    with ClosedLoop(url, lambda number: None if number else request, 1) as loop:
        for seconds in loop.ticks():
            if loop.over:
                return
            if seconds > _LONGEST_S:
                raise LoadError(f"the response did not end in {_LONGEST_S:g} s; ask for fewer --tokens")


def _settled(url: str) -> Scrape:
    """A scrape after the publisher's period, so that everything is in it."""
    time.sleep(0.8)
    return scrape(url)


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the response, one hand-off each.")] = 4000,
    step_ms: Annotated[float, typer.Option(help="Step time of both models.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    result = measure(tokens, step_ms)
    if as_json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:10} {value:.3f}" for name, value in result.items()))


if __name__ == "__main__":
    run(main)
