"""`python -m perf.stall`: how long running streams stand still, and newcomers wait, beside requests that cost much.

Two streams of emulated models (a token every few milliseconds) and a loop of short requests run in a process of their
own while each attack is sent several times, the same requests at once. `p50` and `max` are of the gaps between two
messages of a stream; `wait` is the longest of a short request. The row `nothing` is the machine's own noise.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from perf.command import run
from perf.emulated.repository import write_emulated_repository
from perf.rows import Columns, report, shown, table
from perf.stall.attacks import ATTACKS, HEAVY_CHECKPOINT, attack
from perf.stall.prober import Prober
from tools.targets import target_file
from tools.tritonserver.server import TritonServer

_HEAVY = Path("model_repository/large/1")
_QUIET_S = 1.0
_CONTEXT = 131_072
EVERY = [""]

_SHOWN: Columns = {
    "attack": ("attack", ""),
    "took s": ("took_s", ".2f"),
    "p50 ms": ("gap_p50_ms", ".1f"),
    "p99 ms": ("gap_p99_ms", ".1f"),
    "max ms": ("gap_max_ms", ".1f"),
    "wait ms": ("wait_max_ms", ".0f"),
    "answer": ("answer", ""),
}


def measure(server: TritonServer, prober: Prober, name: str, *, times: int, at_once: int) -> dict[str, Any]:
    """The row of one attack."""
    took, gaps, waits, answers = 0.0, [], [], []
    for number in range(times):
        # One time's bodies are made, and the last one's are gone, before anything is measured: they have up to 40 MB.
        bodies = [ATTACKS[name](number * at_once + i) for i in range(at_once)]
        time.sleep(_QUIET_S)
        sent = time.perf_counter()
        answers = attack(server.http_url, bodies)
        took = max(took, time.perf_counter() - sent)
        time.sleep(_QUIET_S)
        ended = time.perf_counter()
        gaps += prober.gaps(sent, ended)
        waits += prober.waits(sent, ended)
    gaps_ms = 1e3 * np.array(gaps)
    return {
        "attack": name,
        "took_s": took,
        "gap_p50_ms": float(np.percentile(gaps_ms, 50)),
        "gap_p99_ms": float(np.percentile(gaps_ms, 99)),
        "gap_max_ms": float(gaps_ms.max()),
        "wait_max_ms": 1e3 * max(waits, default=0.0),
        "answer": f"{answers[-1].status} {answers[-1].text[:60]}" if answers else "",
    }


def _repository(folder: Path, step_ms: float) -> Path:
    """Two emulated models, and a folder of weights that clients may name."""
    entry = {"policy": "single", "policy_checkpoints": [HEAVY_CHECKPOINT]}
    options = {"max_seq_len": _CONTEXT}
    write_emulated_repository(folder, step_ms={"small": step_ms, "large": step_ms}, entry=entry, options=options)
    shutil.copytree(_HEAVY, folder / HEAVY_CHECKPOINT)
    facts = folder / HEAVY_CHECKPOINT / "config.json"
    classes = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    facts.write_text(json.dumps({**json.loads(facts.read_text()), **classes}))
    return folder


def main(
    names: Annotated[list[str], typer.Option(help="Attacks to send, by the beginning of their name.")] = EVERY,
    times: Annotated[int, typer.Option(help="How often each is sent.", min=1)] = 3,
    at_once: Annotated[int, typer.Option(help="How many at once.", min=1)] = 2,
    step_ms: Annotated[float, typer.Option(help="Step time of both models.")] = 4.0,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write all figures there.", callback=target_file())
    ] = None,
) -> None:
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(_repository(Path(folder), step_ms)) as server,
        Prober(server.grpc_url, max_tokens=_CONTEXT - 100) as prober,
    ):
        for name in ATTACKS:
            if name.startswith(tuple(names)):
                rows.append(measure(server, prober, name, times=times, at_once=at_once))
                print(*shown(rows[-1], _SHOWN).values(), sep=" | ", flush=True)
    report(rows, table([shown(row, _SHOWN) for row in rows], "stalls"), csv_file=csv_file)


if __name__ == "__main__":
    run(main)
