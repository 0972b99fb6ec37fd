"""`python -m tools.check_tensorrt_llm`: is the installed TensorRT-LLM what the adapter was written for?

Compares the installed package with the table of facts, by inspection, and runs a short routed generation on a GPU if
there is one and `--model` names a checkpoint.

Exit codes: 0 all well, 1 something essential is missing or the generation failed, 2 TensorRT-LLM is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tokenrouter.engines.tensorrt_llm.facts import VERSION
from tokenrouter.errors import RouterError
from tools.check_tensorrt_llm.generation import NAMES, Outcome, Settings, generate
from tools.check_tensorrt_llm.inspection import Finding, compare

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


def table(findings: list[Finding]) -> Table:
    """The comparison, one row per entry of the table of facts."""
    result = Table(title="TensorRT-LLM as installed, beside the table of facts")
    for column in ("name", "defined in", "verdict", "missing", "new", "other defaults"):
        result.add_column(column, overflow="fold")
    for finding in findings:
        result.add_row(
            finding.surface.path,
            finding.surface.source,
            verdict(finding),
            finding.problem or ", ".join(finding.missing),
            ", ".join(finding.new),
            ", ".join(finding.changed),
        )
    return result


def verdict(finding: Finding) -> str:
    """`BROKEN` if the adapter cannot work with this, `differs` if it can, `ok`."""
    if finding.essential:
        return "[red]BROKEN[/red]"
    return "[yellow]differs[/yellow]" if finding.missing or finding.problem or finding.changed else "ok"


def report(outcome: Outcome, settings: Settings, console: Console) -> bool:
    """Prints what the generation gave; whether all is well."""
    routed = outcome.routed
    console.print(f"text     {routed.text!r}")
    console.print(f"tokens   {routed.tokens}")
    runs = ", ".join(f"{run.model} {run.start}-{run.end - 1}" for run in routed.runs)
    console.print(f"routing  {routed.handoffs} hand-offs: {runs}")
    console.print(f"reuse    {outcome.reused} tokens found in the KV cache, {outcome.recomputed} lost")
    problems = outcome.problems(settings)
    for problem in problems:
        console.print(f"[red]problem[/red]  {problem}")
    return not problems


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def main(
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Checkpoint folder for the generation; give it twice for small and large."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the routed response.")] = 20,
    prompt: Annotated[str, typer.Option(help="Prompt of the generation.")] = Settings.prompt,
    gpu: Annotated[int, typer.Option(help="GPU that both models share.")] = 0,
    handoff_ids: Annotated[str, typer.Option(help="Token ids that the models never mean, as 151660,151661.")] = "",
    without_gpu: Annotated[bool, typer.Option("--without-gpu", help="Generate even if there is no GPU.")] = False,
) -> None:
    """Compares the installed TensorRT-LLM with what the adapter relies on."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        version = installed_version()
    except ImportError as exc:
        console.print(f"not checked: {exc}")
        raise typer.Exit(NOT_INSTALLED) from exc
    findings = compare()
    console.print(table(findings))
    other = "" if version == VERSION else f"; the adapter was written for {VERSION}"
    console.print(f"TensorRT-LLM {version}{other}")
    broken = [finding for finding in findings if finding.essential]
    for finding in broken:
        console.print(f"[red]BROKEN[/red] {finding.surface.path}: {', '.join(finding.essential)}")
    well = not broken and _generation(model or [], tokens, prompt, gpu, handoff_ids, without_gpu, console)
    raise typer.Exit(0 if well else 1)


def _generation(
    models: list[Path], tokens: int, prompt: str, gpu: int, handoff_ids: str, without_gpu: bool, console: Console
) -> bool:
    """Runs it if it can be run; false if it failed."""
    if not models or not (without_gpu or has_gpu()):
        reason = "there is no GPU" if models else "no --model is given"
        console.print(f"generation skipped: {reason}")
        return True
    if len(models) > len(NAMES):
        raise typer.BadParameter(f"--model is given {len(models)} times; give it once or twice, small first")
    try:
        ids = tuple(int(token) for token in handoff_ids.split(",")) if handoff_ids else None
    except ValueError as exc:
        raise typer.BadParameter(f"--handoff-ids {handoff_ids!r}: {exc}") from exc
    settings = Settings(tuple(models), prompt, tokens, gpu, handoff_ids=ids)
    console.print(f"generating {tokens} tokens; two models load, which takes minutes on a GPU")
    try:
        return report(generate(settings), settings, console)
    except RouterError as exc:
        console.print(f"[red]failed[/red]  {exc}")
        return False


if __name__ == "__main__":
    typer.run(main)
