"""`python -m perf.load.perf_analyzer.inputs`: prompts as an input file of perf_analyzer or genai-perf."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from perf.command import run
from tokenrouter.triton.tensors import ENTRY_INPUTS
from tools.load import PROMPTS, read_prompts
from tools.targets import target_file


class Format(str, Enum):
    """Who reads the file: perf_analyzer takes tensors, genai-perf texts and adds the tensors itself."""

    PERF_ANALYZER = "perf_analyzer"
    GENAI_PERF = "genai-perf"


def tensors(prompts: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    """perf_analyzer's JSON: one entry per request, every tensor of the entry model as a list.

    Raises:
        ValueError: a field is no input tensor of the entry model.
    """
    if unknown := sorted(fields.keys() - ENTRY_INPUTS.keys()):
        raise ValueError(f"no input tensors of the entry model: {', '.join(unknown)}")
    fixed = {name: value if isinstance(value, list) else [value] for name, value in fields.items()}
    return {"data": [{"text_input": [prompt], **fixed} for prompt in prompts]}


def main(
    output: Annotated[Path, typer.Option(help="File to write.", callback=target_file())],
    prompts: Annotated[Path, typer.Option(help='JSON lines, each {"prompt": "..."}.')] = PROMPTS,
    max_tokens: Annotated[int, typer.Option(help="Of a response.")] = 160,
    fields: Annotated[str, typer.Option(help='Further input tensors, like {"policy": "r2r"}.')] = "{}",
    format_: Annotated[Format, typer.Option("--format")] = Format.PERF_ANALYZER,
) -> None:
    chosen = read_prompts(prompts)
    own = {"max_tokens": max_tokens, "stream": True, "exclude_input_in_output": True, **json.loads(fields)}
    if format_ is Format.PERF_ANALYZER:
        text = json.dumps(tensors(chosen, own), indent=1) + "\n"
    else:
        text = "".join(json.dumps({"text": prompt}) + "\n" for prompt in chosen)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)


if __name__ == "__main__":
    run(main, ValueError)
