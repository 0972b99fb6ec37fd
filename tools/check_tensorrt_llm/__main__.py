"""`python -m tools.check_tensorrt_llm`: is the installed TensorRT-LLM what the adapter was written for?

Compares the installed package with the tables of facts, by inspection, and lists what no source could confirm. On a
GPU, with `--model`, it settles that: how many KV blocks there really are, how a resumed request is charged, what a
hand-off costs by part, whether two models route a response, and whether a worker that dies is noticed. `--output`
writes all of it to one file.

Exit codes: 0 all well, 1 something essential is missing or the generation failed, 2 TensorRT-LLM is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tokenrouter.engines.tensorrt_llm.behaviours import BEHAVIOURS
from tokenrouter.engines.tensorrt_llm.environment import clean_environment
from tokenrouter.engines.tensorrt_llm.facts import SURFACES, VERSION
from tokenrouter.errors import RouterError
from tools.check_tensorrt_llm import probes
from tools.check_tensorrt_llm.generation import NAMES, Outcome, Settings, generate
from tools.check_tensorrt_llm.inspection import Finding, compare
from tools.check_tensorrt_llm.measurement import DECODE_STEP, Measurement, opened
from tools.check_tensorrt_llm.report import FORMATS, Report, Section
from tools.check_tensorrt_llm.resident import SURFACES as RESIDENT
from tools.errors import reported
from tools.targets import target_file

NOT_INSTALLED = 2


def installed_version() -> str:
    """Version of the installed TensorRT-LLM.

    Raises:
        ImportError: it is not installed, or its libraries do not load.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ImportError(
            "tensorrt_llm is not installed here. Run this in NVIDIA's image tritonserver:<yy.mm>-trtllm-python-py3, or "
            f"install tensorrt_llm=={VERSION} from NVIDIA's package index"
        )
    try:
        return str(importlib.import_module("tensorrt_llm").__version__)
    except Exception as exc:
        raise ImportError(f"tensorrt_llm is installed but cannot be imported: {type(exc).__name__}: {exc}") from exc


def names(findings: list[Finding], title: str = "TensorRT-LLM as installed, beside the table of facts") -> Section:
    """The comparison, one row per entry of the table."""
    rows = tuple(
        (
            finding.surface.path,
            finding.surface.source,
            verdict(finding),
            finding.problem or ", ".join(finding.missing),
            ", ".join(finding.new),
            ", ".join(finding.changed),
        )
        for finding in findings
    )
    columns = ("name", "defined in", "verdict", "missing", "new", "other defaults")
    broken = tuple(f"BROKEN {each.surface.path}: {', '.join(each.essential)}" for each in findings if each.essential)
    return Section(title, columns, rows, broken)


def verdict(finding: Finding) -> str:
    """`BROKEN` if the adapter cannot work with this, `differs` if it can, `ok`."""
    if finding.essential:
        return "BROKEN"
    return "differs" if finding.missing or finding.problem or finding.changed else "ok"


def unconfirmed() -> Section:
    """What no source could confirm."""
    rows = [(each.path, each.unconfirmed) for each in SURFACES if each.unconfirmed]
    rows += [
        (f"{each.path}, {parameter.name}", "whether it is in this release")
        for each in SURFACES
        for parameter in each.parameters
        if parameter.unconfirmed
    ]
    rows += [(name, each.unconfirmed) for name, each in BEHAVIOURS.items() if each.unconfirmed]
    return Section("Not confirmed by any source", ("fact", "what"), tuple(rows))


def routing(outcome: Outcome, settings: Settings) -> Section:
    """What the generation gave."""
    routed = outcome.routed
    runs = ", ".join(f"{run.model} {run.start}-{run.end - 1}" for run in routed.runs)
    rows = [
        ("text", repr(routed.text)),
        ("tokens", str(routed.tokens)),
        ("routing", f"{routed.handoffs} hand-offs: {runs}"),
        ("reuse", f"{outcome.reused} tokens found in the KV cache, {outcome.recomputed} lost"),
    ]
    if outcome.died is None:
        rows.append(("a worker that dies", "not tried: it has no process of its own"))
    else:
        rows.append(("a worker that dies", f"after {outcome.died[1] * 1e3:.0f} ms: {outcome.died[0] or 'nothing'}"))
    return Section("A routed response", ("what", "found"), tuple(rows), tuple(outcome.problems(settings)))


def has_gpu() -> bool:
    """Whether torch sees a CUDA device; asked elsewhere, since workers inherit what this process has opened."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@reported()
def main(
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Checkpoint folder for the runs; give it twice for small and large."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the routed response.")] = 20,
    prompt: Annotated[str, typer.Option(help="Prompt of the generation.")] = Settings.prompt,
    gpu: Annotated[int, typer.Option(help="GPU that both models share.")] = 0,
    history: Annotated[int, typer.Option(min=1, help="Tokens of the history whose hand-off is measured.")] = 4096,
    handoff_ids: Annotated[str, typer.Option(help="Token ids that the models never mean, as 151660,151661.")] = "",
    resident: Annotated[
        bool, typer.Option("--resident", help="Also names and probes of docs/tensorrt_llm_resident.md.")
    ] = False,
    without_gpu: Annotated[bool, typer.Option("--without-gpu", help="Run even if there is no GPU.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="File for everything found.", callback=target_file(*FORMATS))
    ] = None,
) -> None:
    """Compares the installed TensorRT-LLM with what the adapter relies on."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    clean_environment(())
    try:
        found = Report(installed_version())
    except ImportError as exc:
        console.print(f"not checked: {exc}")
        raise typer.Exit(NOT_INSTALLED) from exc
    found.add(names(compare()), console)
    found.add(unconfirmed(), console)
    if resident:
        found.add(names(compare(RESIDENT), "Names that a resident engine would use"), console)
    other = "" if found.version == VERSION else f"; the adapter was written for {VERSION}"
    found.note(f"TensorRT-LLM {found.version}{other}", console)
    failed = False
    if not found.problems and _may_run(found, model or [], without_gpu, console):
        settings = Settings(tuple(model or []), prompt, tokens, gpu, handoff_ids=_ids(handoff_ids))
        failed = not _runs(found, settings, history, console)
        if resident and not failed:
            found.note("probing for a resident engine; a model loads in a process of its own", console)
            told = probes.Settings(settings.models[0], settings.gpu, _decode_step_ms(found))
            found.add(probes.section(told), console)
    if output is not None:
        found.write(output)
    raise typer.Exit(1 if found.problems or failed else 0)


def _may_run(found: Report, models: list[Path], without_gpu: bool, console: Console) -> bool:
    """Whether models can be loaded."""
    if len(models) > len(NAMES):
        raise typer.BadParameter(f"--model is given {len(models)} times; give it once or twice, small first")
    if models and (without_gpu or has_gpu()):
        return True
    found.note(f"generation skipped: {'there is no GPU' if models else 'no --model is given'}", console)
    return False


def _decode_step_ms(found: Report) -> float:
    """As it was measured; 0 if it was not."""
    cells = (row[1] for section in found.sections for row in section.rows if row[0] == DECODE_STEP)
    return next((float(cell) for cell in cells if cell != "-"), 0.0)


def _ids(text: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(token) for token in text.split(",")) if text else None
    except ValueError as exc:
        raise typer.BadParameter(f"--handoff-ids {text!r}: {exc}") from exc


def _runs(found: Report, settings: Settings, history: int, console: Console) -> bool:
    """Measures one model, then routes between both; false if they do not load or a request fails."""
    ids = {} if settings.handoff_ids is None else {"handoff_ids": list(settings.handoff_ids)}
    try:
        found.note(f"measuring hand-offs of {history} tokens; a model loads, which takes minutes on a GPU", console)
        with opened(Measurement(settings.models[0], settings.gpu, history, ids)) as bench:
            for section in bench.sections():
                found.add(section, console)
        found.note(f"generating {settings.tokens} tokens; two models load", console)
        found.add(routing(generate(settings), settings), console)
    except RouterError as exc:
        found.note(f"[red]failed[/red]  {exc}", console)
        return False
    return True


if __name__ == "__main__":
    typer.run(main)
