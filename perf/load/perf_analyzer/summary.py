"""`python -m perf.load.perf_analyzer.summary FOLDER`: what perf_analyzer recorded, one column per concurrency.

perf_analyzer itself reports latencies of whole requests; times of tokens are in its profile export alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from perf.command import run
from perf.load.timing import Timing, summary
from perf.rows import report, upright
from tools.errors import CommandError
from tools.targets import target_file

_NS = 1e-9


def timing(request: dict[str, Any]) -> Timing:
    """One request of a profile export."""
    result = Timing(started=request["timestamp"] * _NS)
    for moment, output in zip(request["response_timestamps"], request["response_outputs"], strict=True):
        result.add(_count(output.get("output_ids", "")), moment * _NS)
        result.finish_reason = output.get("finish_reason") or result.finish_reason
    return result.end()


def _count(ids: int | list[int] | str) -> int:
    """Tokens of a response; perf_analyzer writes "" for a tensor that is not there, and one value without a list."""
    return len(ids) if isinstance(ids, (list, str)) else 1


def rows(export: Path) -> list[dict[str, Any]]:
    """One row per experiment of a profile export."""
    return [
        {
            "tool": "perf_analyzer",
            "user": "gRPC stream",
            "loop": "closed" if experiment["experiment"]["mode"] == "concurrency" else "open",
            "in_flight": experiment["experiment"]["value"],
            **summary([timing(request) for request in experiment["requests"]]),
        }
        for experiment in json.loads(export.read_text())["experiments"]
    ]


def main(
    folder: Annotated[Path, typer.Argument(help="Holds concurrency_*.json.")],
    csv: Annotated[Path | None, typer.Option(help="Also write this file.", callback=target_file())] = None,
) -> None:
    exports = sorted(folder.glob("concurrency_*.json"), key=lambda path: int(path.stem.rpartition("_")[2]))
    table = [row for export in exports for row in rows(export)]
    if not table:
        raise CommandError(f"{folder} holds no concurrency_*.json with requests")
    report(table, upright(table, "perf_analyzer"), csv_file=csv)


if __name__ == "__main__":
    run(main)
