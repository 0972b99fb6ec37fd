"""The schedule as a file in Chrome's trace format (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.simulate.meter import Step

MODELS_PID = 1
REQUESTS_PID = 2
MAX_REQUEST_LANES = 64
"""Lanes per request are drawn up to this many requests."""


def write_trace(steps: Sequence[Step], models: Sequence[str], path: Path) -> None:
    """Writes complete events ("X", microseconds): a lane per model, and a lane per request where there are few."""
    document = {"displayTimeUnit": "ms", "traceEvents": list(_events(steps, models))}
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


def _events(steps: Sequence[Step], models: Sequence[str]) -> Iterator[dict[str, Any]]:
    lanes = {name: tid for tid, name in enumerate(models)}
    yield from _names(MODELS_PID, "models", lanes)
    for step in steps:
        yield _complete(step, f"batch of {len(step.requests)}", MODELS_PID, lanes[step.model])
    requests = sorted({request for step in steps for request in step.requests})
    if len(requests) <= MAX_REQUEST_LANES:
        yield from _names(REQUESTS_PID, "requests", {f"request {request}": request for request in requests})
        for step in steps:
            for request in step.requests:
                yield _complete(step, step.model, REQUESTS_PID, request)


def _complete(step: Step, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": name,
        "cat": step.model,
        "ph": "X",
        "ts": step.start_ns / 1000,
        "dur": (step.end_ns - step.start_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "args": {
            "batch": len(step.requests),
            "extended_tokens": step.extended_tokens,
            "reason": step.reason,
            "requests": list(step.requests[:MAX_REQUEST_LANES]),
        },
    }


def _names(pid: int, process: str, lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "ts": 0, "dur": 0, "pid": pid}
    yield {**common, "name": "process_name", "tid": 0, "args": {"name": process}}
    for name, tid in lanes.items():
        yield {**common, "name": "thread_name", "tid": tid, "args": {"name": name}}
