"""`python -m perf.chaos --minutes 10 --inflight 16`: a deployment is tormented while clients compare every answer.

A closed loop of known answers (streamed and whole, over gRPC, Triton's HTTP and `/v1`, all policies) runs against the
repository under its supervisor, while processes are killed, stopped and continued, models reloaded, and clients send
malformed and oversized requests, flood, and leave; in random order from a seed. Answers are compared with those that
the offline engine gave beforehand, token by token.

Checks: no answer is wrong, no request hangs, none fails but where the entry model or tritonserver died, every process
comes back, nothing is left. Ends with exit code 1 if one of them does not hold, or a bound on time or memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from perf.chaos.outcome import Outcome
from perf.chaos.plot import plot
from perf.chaos.run import Known, chaos
from perf.chaos.service import Service
from perf.command import run
from perf.rows import show, table, write_rows
from tools.progress import LateProgress
from tools.targets import IMAGE_SUFFIXES, target_file


def _show(outcome: Outcome) -> None:
    facts = outcome.facts()
    for name in ("requests", "right", "wrong", "failed_clearly", "failed_beside_no_death", "hung"):
        print(f"{name:24} {facts[name]}")
    for name in ("longest_stall_seconds", "stall_seconds_beside_attacks", "stall_seconds_in_pauses"):
        print(f"{name:32} {facts[name]}")
    rows = [
        {"event": kind, "times": str(number), **_recovery(facts["recovery_seconds"].get(kind, {}))}
        for kind, number in facts["events"].items()
    ]
    show(table(rows))


def _recovery(spread: dict[str, float]) -> dict[str, str]:
    return {f"back after, {name}": f"{spread[name]:.2f} s" if name in spread else "-" for name in ("p50", "max")}


def _rows(outcome: Outcome) -> list[dict[str, object]]:
    return [
        {
            "at_s": round(event.began_s - outcome.began_s, 2),
            "event": event.kind,
            "seconds": round(event.ended_s - event.began_s, 3),
            "recovery_s": "" if event.recovery_s is None else round(event.recovery_s, 3),
            "stall_s": round(event.stall_s, 4),
        }
        for event in outcome.events
    ]


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="Of chaos.")] = 10.0,
    inflight: Annotated[int, typer.Option(min=1, help="Known requests that run at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the order of events and requests.")] = 1,
    model_repository: Annotated[Path, typer.Option(help="A repository like the demo's.")] = Path("model_repository"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write all events.", callback=target_file())] = None,
    image: Annotated[
        Path | None, typer.Option("--plot", help="Draw the run over time.", callback=target_file(*IMAGE_SUFFIXES))
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Write what the launcher printed.", callback=target_file())] = None,
) -> None:
    known = Known.of(model_repository)
    with LateProgress() as progress, Service(model_repository) as service:
        try:
            outcome = chaos(service, known, seconds=60 * minutes, in_flight=inflight, seed=seed, report=progress)
        finally:
            service.stop()
            if log:
                log.write_text(service.log_text())
    if csv_path:
        write_rows(csv_path, _rows(outcome))
    if image:
        plot(outcome, image)
    if as_json:
        print(json.dumps(outcome.facts(), indent=2))
    else:
        _show(outcome)
        print("\n".join(f"FAILED: {failure}" for failure in (*outcome.broken(), *outcome.slow())))
    if outcome.broken() or outcome.slow():
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
