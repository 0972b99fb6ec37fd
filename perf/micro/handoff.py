"""`python -m perf.micro.handoff`: what a hand-off costs, through the real server, with an idle peer, by carrier.

Two emulated models (steps of 1 ms) write alternate tokens of one request at a time, so the target is always idle. The
time is from the end of the step at one subserver to *ready* at the other, as the subservers measure it. One server,
with an entry model for each way to the large model: this host's socket, and TLS on loopback; responses alternate.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from perf.command import run
from perf.emulated.repository import write_emulated_repository
from perf.hosts.ways import TLS, UNIX, serve
from tokenrouter.metrics_page import Scrape, scrape
from tools.load import ClosedLoop, LoadError, request_bytes

_NAME = "tokenrouter_handoff_seconds"
_LONGEST_S = 120.0


def measure(tokens: int, step_ms: float, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by way: hand-off times in ms, p50, p90, p99 and mean; and how many there were."""
    entry = {"policy": "scripted", "policy_params": {"writers": ["small", "large"], "trigger": "keep"}, "aliases": {}}

    def write(folder: Path) -> Path:
        return write_emulated_repository(folder, step_ms={"small": step_ms, "large": step_ms}, entry=entry)

    found: dict[str, list[dict[str, float]]] = {UNIX.label: [], TLS.label: []}
    with serve(write, [UNIX, TLS], "large") as server:
        for way in (UNIX, TLS):
            _generate(server.grpc_url, way.name, 200)
        for _ in range(rounds):
            for way in (UNIX, TLS):
                before = _settled(server.metrics_url)
                _generate(server.grpc_url, way.name, tokens)
                found[way.label].append(_figures(_settled(server.metrics_url).since(before)))
    return {label: {key: median(row[key] for row in rows) for key in rows[0]} for label, rows in found.items()}


def _figures(spent: Scrape) -> dict[str, float]:
    quantiles = {f"p{round(q * 100)}_ms": spent.quantile(_NAME, q) * 1e3 for q in (0.5, 0.9, 0.99)}
    return {**quantiles, "mean_ms": spent.mean(_NAME) * 1e3, "handoffs": spent.value(f"{_NAME}_count")}


def _generate(url: str, entry: str, tokens: int) -> None:
    """One response, from beginning to end."""
    request = request_bytes(entry, "abcdefgh", max_tokens=tokens)
    with ClosedLoop(url, lambda number: None if number else request, 1) as loop:
        for seconds in loop.ticks():
            if loop.over:
                return
            if seconds > _LONGEST_S:
                raise LoadError(f"the response did not end in {_LONGEST_S:g} s; ask for fewer --tokens")


def _settled(url: str) -> Scrape:
    """A scrape after the publisher's period, so that everything is in it."""
    time.sleep(1.3)
    return scrape(url, _NAME)


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a response, one hand-off each.")] = 2000,
    step_ms: Annotated[float, typer.Option(help="Step time of both models.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Responses over each way.")] = 3,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    found = measure(tokens, step_ms, rounds)
    if as_json:
        print(json.dumps(found))
        return
    for label, figures in found.items():
        print(f"{label:15} " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    run(main)
