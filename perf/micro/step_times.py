"""`python -m perf.micro.step_times`: how exactly the emulated engine keeps its step times.

Runs steps of an emulated engine back to back and compares their wall-clock time with the configured one. The result is
the error of every *emulated* measurement: a step that takes longer than it should makes the server look slower.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from perf.emulated.repository import VOCAB_SIZE
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.emulated.engine import EmulatedConfig, EmulatedEngine, KvConfig
from tokenrouter.engines.emulated.signals import SignalsConfig

_PROMPT = [1, 2, 3, 4]


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
    step_ms: Annotated[list[float] | None, typer.Option(help="Step times; may be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="Per step time and batch size.")] = 3.0,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Also write this file.")] = None,
) -> None:
    """Median, 99th percentile and largest error of the emulated engine's step times."""
    torch.set_num_threads(1)  # as where an emulated engine is served
    table = Table("step, ms", "batch", "steps", "median error, ms", "p99, ms", "largest, ms", title="emulated engine")
    rows = []
    for milliseconds in step_ms or [0.5, 1.0, 6.0, 27.9]:
        for size in batch or [1, 16]:
            error = errors_ms(milliseconds, size, seconds)
            median, p99, largest = np.quantile(error, [0.5, 0.99, 1.0])
            rows.append(
                {
                    "kind": "emulated",
                    "step_ms": milliseconds,
                    "batch": size,
                    "steps": len(error),
                    "median_error_ms": round(float(median), 4),
                    "p99_error_ms": round(float(p99), 4),
                    "largest_error_ms": round(float(largest), 4),
                }
            )
            table.add_row(
                f"{milliseconds:g}", str(size), str(len(error)), f"{median:.4f}", f"{p99:.4f}", f"{largest:.4f}"
            )
    Console().print(table)
    if csv_file is not None:
        csv_file.parent.mkdir(parents=True, exist_ok=True)
        with csv_file.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    typer.run(main)
