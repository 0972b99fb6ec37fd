"""`python -m perf.fuzz --requests 20000 --seed 1`: malformed requests to a server of its own, beside sound neighbours.

So many per protocol: Triton's HTTP and gRPC, `/v1`, and the channel between the models, from a generator with a seed.
Checks: every request is answered, the median within 0.1 s; neighbours get exactly the tokens that an offline run of the
deployment gave; no process ends; memory stays flat; nothing is held at the end. Ends with exit code 1 if one of them
does not hold. The longest stall of a running stream is reported beside that of a calm server.

`python -m perf.fuzz.codec` lets coverage find payloads for the channel's codec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from perf.command import run
from perf.fuzz.plan import PROTOCOLS, Outcome, Plan, Target
from perf.fuzz.run import fuzz
from perf.load.known import known_answers
from perf.load.ways import Endpoints
from perf.rows import show, table
from perf.stall.prober import Prober
from tokenrouter.metrics_page import still_busy
from tools.load import read_prompts
from tools.openai_server import OpenAiServer
from tools.progress import LateProgress
from tools.targets import target_file
from tools.tritonserver.server import TritonServer

_PROMPTS = 8
LONG: dict[str, Any] = {"prompt": "Start 1: +1 =", "max_tokens": 800, "end_id": 257, "policy": "single"}
"""A response of the demo pair that does not end, since it never writes this end: its stalls are looked for."""
_ALL = list(PROTOCOLS)


def target_of(server: TritonServer, front: OpenAiServer) -> Target:
    """A server that this process has started."""
    pids = {"tritonserver": server.pid, **dict(sorted(server.stub_pids().items()))}
    for child in psutil.Process().children():
        if "tokenrouter.openai_api" in child.cmdline():
            pids["openai_api"] = child.pid
    ports = Endpoints(server.ports.http, server.ports.grpc, front.port)
    return Target(ports, server.run_dir / "channel", server.metrics_url, pids)


def _show(outcome: Outcome) -> None:
    rows = []
    for name, fuzzed in outcome.rounds.items():
        facts = fuzzed.facts()
        columns = ("requests", "answered", "median_seconds", "p99_seconds", "slowest_seconds", "slowest_kind")
        rows.append(
            {"protocol": name, **{column: str(facts[column]) for column in (*columns, "longest_stall_seconds")}}
        )
    show(table(rows))
    neighbours = ", ".join(f"{number} {verdict.value}" for verdict, number in outcome.neighbours.verdicts.items())
    print(f"neighbours: {neighbours}; longest stall of a calm server {outcome.calm_stall_s:.3f} s")


def main(
    requests: Annotated[int, typer.Option(min=1, help="Malformed requests per protocol.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the generator.")] = 1,
    protocols: Annotated[list[str], typer.Option(help="Some of: http, grpc, v1, channel.")] = _ALL,
    clients: Annotated[int, typer.Option(min=1, help="That send malformed requests at once.")] = 2,
    inflight: Annotated[int, typer.Option(min=1, help="Neighbours: sound requests at once.")] = 4,
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    first: Annotated[int, typer.Option(min=0, help="Number of the first request: repeats a part of a run.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    log: Annotated[Path | None, typer.Option(help="Write the server's log.", callback=target_file())] = None,
) -> None:
    if unknown := set(protocols) - set(PROTOCOLS):
        raise ValueError(f"--protocols {', '.join(sorted(unknown))}: there are {', '.join(PROTOCOLS)}")
    plan = Plan(requests, seed, protocols, clients, inflight, first=first)
    answers = known_answers(model_repository, read_prompts()[:_PROMPTS])
    with (
        TritonServer(model_repository) as server,
        OpenAiServer(server, model_repository) as front,
        LateProgress() as progress,
    ):
        front.wait()
        target = target_of(server, front)
        try:
            with Prober(server.grpc_url, **LONG) as prober:
                outcome = fuzz(target, answers, prober, plan, progress)
        finally:
            if log:
                log.write_text(server.log_text())
        if not any(fuzzed.ended for fuzzed in outcome.rounds.values()):
            outcome.held = still_busy(server.metrics_url)
    if as_json:
        print(json.dumps(outcome.facts(plan), indent=2))
    else:
        _show(outcome)
    if outcome.failures:
        for failure in outcome.failures:
            print(f"FAILED: {failure}"[:300])
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main, ValueError)
