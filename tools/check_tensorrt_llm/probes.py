"""Probes 1 to 12 of docs/tensorrt_llm_resident.md, each in a process of its own and with a time-out.

Written are those that need no object of the library whose making no source confirms: the way to the executor, with
which probe 1 begins, and the cost of our own code, probe 9. The others are done by hand, as the page says.

A probe is `python -m tools.check_tensorrt_llm.probes NUMBER ...`; its last line is its answer as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from tokenrouter.messages import Sampling
from tools.check_tensorrt_llm.report import Section

TIMEOUT_S = 900.0
BY_HAND = {
    1: "a step of ours: no source says how an LlmRequest is made for it",
    2: "parking: begins with the step of probe 1",
    3: "resuming: begins with the step of probe 1",
    4: "rolling back: begins with the step of probe 1",
    5: "more residents than rows: begins with the step of probe 1",
    6: "several positions: begins with the step of probe 1",
    7: "steps of ours beside the library's: begins with the step of probe 1",
    8: "hidden states out of a graph: needs a class of the model under capture",
    10: "an exception in a step: begins with the step of probe 1",
    11: "a loop per rank: needs two GPUs",
    12: "blocks held by a connector: how its classes are loaded is not confirmed",
}
PARTS = (
    "model_engine",
    "model_engine.forward",
    "model_engine.cuda_graph_runner",
    "resource_manager",
    "active_requests",
)
"""Of `llm._executor.engine`, see `resident.SURFACES`."""

REMARK = "nothing of it is used by the adapter of today, so a FAIL breaks nothing"
ROWS = (1, 8, 32, 64)
REPEATS = 50
SHARE = 0.1
"""Of a decode step that our sampler may take."""


class Verdict(Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    NOT_TRIED = "NOT TRIED"


@dataclass(frozen=True)
class Answer:
    """What a probe found."""

    verdict: Verdict
    found: str


@dataclass(frozen=True)
class Settings:
    """What probes are told.

    Attributes:
        model: checkpoint of the small model.
        gpu: its index.
        step_ms: a decode step of 8, or 0 if it was not measured.
    """

    model: Path
    gpu: int = 0
    step_ms: float = 0.0


# --- here ------------------------------------------------------------------------------------------------------------


def section(settings: Settings) -> Section:
    """Tries what is written, one after the other, and lists the rest."""
    rows = [("1, its first step: the executor is reached", tried(_command(1, settings)))]
    rows += [("9: our sampler within a tenth of a step", tried(_command(9, settings)))]
    rows += [(f"{number}, by hand", Answer(Verdict.NOT_TRIED, why)) for number, why in BY_HAND.items()]
    cells = tuple((name, answer.verdict.value, answer.found) for name, answer in rows)
    return Section("Probes of a resident engine", ("probe", "verdict", "found"), cells, remark=REMARK)


def _command(number: int, settings: Settings) -> list[str]:
    module = [sys.executable, "-m", "tools.check_tensorrt_llm.probes", str(number)]
    return [*module, "--model", str(settings.model), "--gpu", str(settings.gpu), "--step-ms", str(settings.step_ms)]


def tried(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> Answer:
    """The answer of a probe's process; one that ends otherwise, or not in time, has failed."""
    environment = {**os.environ, "TLLM_WORKER_USE_SINGLE_PROCESS": "1"}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Answer(Verdict.FAIL, f"no answer within {timeout_s:g} s")
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
        return Answer(Verdict(answer["verdict"]), str(answer["found"]))
    except (IndexError, KeyError, TypeError, ValueError):
        said = next(iter(ended.stderr.strip().splitlines()[-1:]), "nothing on stderr")
        return Answer(Verdict.FAIL, f"the process ended with {ended.returncode}: {said}")


# --- in a process of its own -----------------------------------------------------------------------------------------


def reached(llm: Any) -> Answer:
    """Whether the executor and its parts can be reached in this process.

    Args:
        llm: the library's `LLM`, loaded.
    """
    engine = getattr(getattr(llm, "_executor", None), "engine", None)
    if engine is None:
        return Answer(Verdict.FAIL, "llm._executor.engine is not there")
    missing = [part for part in PARTS if not _has(engine, part)]
    if missing:
        return Answer(Verdict.FAIL, f"llm._executor.engine has no {', '.join(missing)}")
    return Answer(Verdict.PASS, f"llm._executor.engine is a {type(engine).__name__} with all parts")


def _has(engine: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(engine, name):
            return False
        engine = getattr(engine, name)
    return True


def judged(ms: dict[int, float], step_ms: float) -> Answer:
    """Whether our sampler is fast enough.

    Args:
        ms: rows -> median milliseconds of a call.
        step_ms: of a decode step; 0 if it is not known.
    """
    found = ", ".join(f"{rows} rows {value:.3f} ms" for rows, value in ms.items())
    if not step_ms:
        return Answer(Verdict.NOT_TRIED, f"{found}; no step was measured to compare with")
    fits = max(ms.values()) <= SHARE * step_ms
    return Answer(Verdict.PASS if fits else Verdict.FAIL, f"{found}; a step takes {step_ms:.3f} ms")


def sampler_ms(device: str, width: int, rows: Sequence[int] = ROWS, repeats: int = REPEATS) -> dict[int, float]:
    """Median milliseconds of our sampler by number of greedy rows.

    Args:
        width: of the logits.
    """
    import torch

    from tokenrouter import sampling

    took = {}
    for count in rows:
        logits = torch.randn(count, width, device=device)
        row: Any = SimpleNamespace(sampling=Sampling(1), tokens=[1, 2], prompt_tokens=1, banned=(), seed=0, position=0)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            sampling.sample(logits, [row] * count).tolist()
            times.append((time.perf_counter() - began) * 1e3)
        took[count] = statistics.median(times)
    return took


def _reach(settings: Settings) -> Answer:
    from tools.check_tensorrt_llm.measurement import Measurement, loaded

    with loaded(Measurement(settings.model, settings.gpu, 64, {}).config()) as library:
        return reached(library.llm)


def _sampler(settings: Settings) -> Answer:
    import torch

    from tokenrouter.checkpoint import vocabulary_size

    if not torch.cuda.is_available():
        return Answer(Verdict.NOT_TRIED, "there is no GPU")
    return judged(sampler_ms(f"cuda:{settings.gpu}", vocabulary_size(settings.model)), settings.step_ms)


_WRITTEN: dict[int, Callable[[Settings], Answer]] = {1: _reach, 9: _sampler}


def main(
    number: Annotated[int, typer.Argument(help="Of the probe.")],
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")],
    gpu: Annotated[int, typer.Option(help="GPU.")] = 0,
    step_ms: Annotated[float, typer.Option(help="Of a decode step.")] = 0.0,
) -> None:
    """Runs one probe and prints its answer as JSON."""
    answer = _WRITTEN[number](Settings(model, gpu, step_ms))
    print(json.dumps({"verdict": answer.verdict.value, "found": answer.found}))


if __name__ == "__main__":
    typer.run(main)
