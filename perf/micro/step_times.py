"""`python -m perf.micro.step_times`: how exactly the emulated engine keeps its step times.

Runs steps of an emulated engine back to back and compares their wall-clock time with the configured one. The result is
the error of every *emulated* measurement: a step that takes longer than it should makes the server look slower.
"""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from perf.command import run
from perf.emulated.repository import VOCAB_SIZE
from perf.rows import Columns, report, shown, table
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.emulated.engine import EmulatedConfig, EmulatedEngine, KvConfig
from tokenrouter.engines.emulated.signals import SignalsConfig
from tools.targets import target_file

STEP_MS = [0.5, 1.0, 6.0, 27.9]
BATCHES = [1, 16]

_PROMPT = [1, 2, 3, 4]
_SHOWN: Columns = {
    "step, ms": ("step_ms", "g"),
    "batch": ("batch", ""),
    "steps": ("steps", ""),
    "median error, ms": ("median_error_ms", ".4f"),
    "p99, ms": ("p99_error_ms", ".4f"),
    "largest, ms": ("largest_error_ms", ".4f"),
}


def errors_ms(step_ms: float, batch: int, seconds: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[S] wall-clock time minus configured time of every step, in ms."""
    steps = max(20, round(1e3 * seconds / step_ms))
    config = EmulatedConfig(
        step_ms=step_ms, repeat=True, max_seq_len=1 << 20, signals=SignalsConfig(0.35),
        kv_cache_config=KvConfig(max_tokens=1 << 28),
    )  # fmt: skip
    engine = EmulatedEngine(config, vocab_size=VOCAB_SIZE)
    handles = [engine.open(kv_tokens=1 << 20, prompt_tokens=len(_PROMPT)) for _ in range(batch)]
    engine.step([EngineRow(handle, _PROMPT) for handle in handles])
    took = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step([EngineRow(handle, [1]) for handle in handles])
        took.append(1e3 * (time.perf_counter() - started))
    return np.array(took) - step_ms


def main(
    step_ms: Annotated[list[float], typer.Option(help="Step times.")] = STEP_MS,
    batch: Annotated[list[int], typer.Option(help="Batch sizes.")] = BATCHES,
    seconds: Annotated[float, typer.Option(help="Per step time and batch size.")] = 3.0,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Also write this file.", callback=target_file())
    ] = None,
) -> None:
    torch.set_num_threads(1)  # as where an emulated engine is served
    rows = []
    for milliseconds, size in product(step_ms, batch):
        error = errors_ms(milliseconds, size, seconds)
        median, p99, largest = (round(float(value), 4) for value in np.quantile(error, [0.5, 0.99, 1.0]))
        rows.append(
            {
                "kind": "emulated",
                "step_ms": milliseconds,
                "batch": size,
                "steps": len(error),
                "median_error_ms": median,
                "p99_error_ms": p99,
                "largest_error_ms": largest,
            }
        )
    report(rows, table((shown(row, _SHOWN) for row in rows), "emulated engine"), csv_file=csv_file)


if __name__ == "__main__":
    run(main)
