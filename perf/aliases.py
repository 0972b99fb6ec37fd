"""`python -m perf.aliases`: what other names and shapes of the entry model cost a server that nobody calls by them.

The demo deployment is built once per row and started in turns. Start-up is the time until the server is ready; memory
is the proportional set size of tritonserver and all its models' processes, with shared pages split between those that
have them.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import psutil
import typer

from perf.command import run
from tools.build_repository.build import write_repository
from tools.build_repository.check import checked
from tools.build_repository.spec import AliasSpec, load_spec
from tools.markdown import markdown
from tools.tritonserver.server import TritonServer

SHAPES = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "llmapi", "unbatched")
ROWS: dict[str, dict[str, Any]] = {
    "none": {"aliases": {}},
    "five ensembles": {"aliases": {name: AliasSpec(name) for name in SHAPES}},
    "`entry.unary`": {"aliases": {}, "unary": "once"},
    "`preprocessing`, `postprocessing`": {
        "aliases": {name: AliasSpec(name) for name in ("preprocessing", "postprocessing")}
    },
}


def main(
    deployment: Annotated[Path, typer.Option(help="The deployment's YAML file.")] = Path("configs/demo.yaml"),
    model_repository: Annotated[
        Path, typer.Option(help="A built repository of it, for what lies in version folders.")
    ] = Path("model_repository"),
    starts: Annotated[int, typer.Option(min=1, help="Starts of every row.")] = 5,
) -> None:
    """Prints start-up time and memory by row."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            name: _built(deployment, model_repository, Path(scratch) / str(i), ROWS[name])
            for i, name in enumerate(ROWS)
        }
        for _ in range(starts):
            for name, folder in folders.items():
                found[name].append(_started(folder))
    rows = []
    for name, values in found.items():
        seconds, mib = (sorted(column) for column in zip(*values, strict=True))
        ready = f"{median(seconds):.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})"
        rows.append([name, ready, f"{median(mib):.0f}", f"{median(mib) - median(m for _, m in found['none']):+.0f}"])
    print(markdown(["beside the entry model", "ready after s", "memory MiB", "more MiB"], rows))


def _built(deployment: Path, repository: Path, folder: Path, fields: dict[str, Any]) -> Path:
    shutil.copytree(repository, folder, ignore=shutil.ignore_patterns("ensemble", "tensorrt_llm_bls"))
    spec = load_spec(deployment)
    spec = msgspec.structs.replace(spec, entry=msgspec.structs.replace(spec.entry, **fields))
    write_repository(checked(spec, folder), folder)
    return folder


def _started(folder: Path) -> tuple[float, float]:
    """Seconds until the server is ready, and MiB of its processes."""
    began = time.monotonic()
    with TritonServer(folder) as server:
        seconds = time.monotonic() - began
        processes = [psutil.Process(pid) for pid in (server.pid, *server.stub_pids().values())]
        return seconds, sum(process.memory_full_info().pss for process in processes) / 2**20


if __name__ == "__main__":
    run(main)
