"""Command line: ``python -m tools.demo_models train|evaluate|problems``."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

# These commands read local folders only; nothing may be looked up on a hub. Set before transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer

from tools.demo_models import evaluate as evaluation
from tools.demo_models import train as training
from tools.demo_models.task import dump_problems, held_out_problems, load_problems
from tools.errors import reported
from tools.progress import LateProgress, counted
from tools.targets import target_file, target_folder

PROBLEMS_PATH = Path("configs/demo/problems.jsonl")
PROBLEM_COUNT = 400

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


@app.command()
@reported()
def train(
    output: Annotated[
        Path, typer.Option(help="Model repository; checkpoints go to NAME/1 in it.", callback=target_folder())
    ],
    only: Annotated[Literal["small", "large"] | None, typer.Option(help="Train just this model.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps; default: the recipe's.")] = None,
    # One thread by default: the shipped checkpoints were made so, and on cores that other processes use too, the
    # threads of one operator wait for each other (more than ten times slower was seen with two).
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; use more on idle cores only.")] = 1,
) -> None:
    """Train the demo models and write their checkpoints."""
    torch.set_num_threads(threads)
    for name, recipe in training.RECIPES.items():
        if only in (None, name):
            _train_one(name, replace(recipe, steps=steps or recipe.steps), output / name / "1")


@app.command()
@reported()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint folder.")],
    problems: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Problem file.")] = PROBLEMS_PATH,
    batch: Annotated[int, typer.Option(min=1, help="Problems decoded together.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; use more on idle cores only.")] = 1,
) -> None:
    """Print the exact-answer accuracy of a checkpoint, decoding greedily."""
    torch.set_num_threads(threads)
    model, tokenizer = evaluation.load_model(checkpoint), evaluation.load_tokenizer(checkpoint)
    chosen = load_problems(problems)
    with counted("evaluating", len(chosen)) as advance:
        measured = evaluation.accuracy(model, tokenizer, chosen, batch, advance)
    typer.echo(f"{checkpoint}: {measured:.1%} of {len(chosen)} problems answered exactly")


@app.command()
@reported()
def problems(
    output: Annotated[Path, typer.Option(help="File to write.", callback=target_file())] = PROBLEMS_PATH,
    count: Annotated[int, typer.Option(min=1, help="Number of problems.")] = PROBLEM_COUNT,
) -> None:
    """Write the held-out problem set; the same file every time."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(dump_problems(held_out_problems(count)), encoding="utf-8")
    typer.echo(f"{output}: {count} problems")


def _train_one(name: str, recipe: training.Recipe, folder: Path) -> None:
    began = time.monotonic()
    with LateProgress() as report:
        model = training.train(recipe, report=report, name=name)
    training.save_checkpoint(model, folder)
    minutes = (time.monotonic() - began) / 60
    typer.echo(f"{folder}: {training.parameter_count(model):,} parameters, trained in {minutes:.1f} minutes")


if __name__ == "__main__":
    app()
