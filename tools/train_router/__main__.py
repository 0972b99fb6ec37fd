"""Command line: ``python -m tools.train_router collect|r2r|citer|collm|query|threshold|demo``."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

# Local folders only; nothing may be looked up on a hub. Set before transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch
import typer

from tokenrouter.errors import RouterError
from tokenrouter.policies.checkpoints import KINDS, load_router, save_router
from tools.errors import CommandError, reported
from tools.json_lines import read_json_lines
from tools.targets import target_file, target_folder
from tools.train_router import demo as demo_pair
from tools.train_router import trainers
from tools.train_router.collect import Collector, Task
from tools.train_router.corpus import Corpus
from tools.train_router.fit import Schedule
from tools.train_router.pair import Pair, input_embedding, output_embedding
from tools.train_router.problems import CHECKERS, Example, demo_examples
from tools.train_router.trainers import Trained

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
refusals = reported(ValueError, msgspec.MsgspecError)

FolderOption = Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkpoint folder; one tokenizer.")]
ProblemsOption = Annotated[
    Path | None, typer.Option(exists=True, help="JSON lines: prompt, answer, completion. Default: the demo task.")
]
DataOption = Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder that `collect` wrote.")]
OutputOption = Annotated[
    Path, typer.Option(help="The file to write, *.safetensors.", callback=target_file(".safetensors"))
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads; more than 1 pays on idle cores only.")]
RecallOption = Annotated[float, typer.Option(min=0, max=1, help="Of the stored threshold, on validation rows.")]
EpochsOption = Annotated[int | None, typer.Option(min=1, help="At most so many; default: the trainer's.")]


@app.command()
@refusals
def collect(
    small: FolderOption,
    large: FolderOption,
    output: Annotated[Path, typer.Option(help="Folder to write.", callback=target_folder())],
    problems: ProblemsOption = None,
    count: Annotated[int, typer.Option(min=1, help="Only the first so many problems.")] = 1000,
    text: Annotated[Literal["large", "gold"], typer.Option(help="The large model's answers, or references.")] = "large",
    checker: Annotated[Literal["demo", "number", "none"], typer.Option(help="Who judges answers.")] = "demo",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 160,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the demo problems.")] = demo_pair.SEED,
    threads: ThreadsOption = 1,
) -> None:
    """Run both models over problems and write labelled features."""
    torch.set_num_threads(threads)
    Corpus.refuse_foreign(output)
    task = Task(_examples(problems, count, seed), CHECKERS.get(checker), text, max_tokens)
    corpus = Collector(Pair(small, large, batch=batch, device=device), task).run()
    corpus.save(output)
    typer.echo(demo_pair.describe(corpus, output))


def _trainer(name: str, schedule: Schedule, train: Callable[[Corpus, Schedule, float], Trained], text: str) -> None:
    """Adds the command of a trainer that takes the recall of the threshold."""

    @app.command(name, help=text)
    @refusals
    def command(
        data: DataOption,
        output: OutputOption,
        recall: RecallOption = trainers.RECALL,
        epochs: EpochsOption = None,
        threads: ThreadsOption = 1,
    ) -> None:
        torch.set_num_threads(threads)
        _refuse_foreign(output)
        _store(train(Corpus.load(data), _limited(schedule, epochs), recall), output)


_trainer(
    "r2r",
    trainers.R2R_SCHEDULE,
    lambda corpus, *how: trainers.train_r2r(corpus, input_embedding(corpus.small), *how),
    "Train R2R's network (data: the large model's answers).",
)
_trainer(
    "citer",
    trainers.CITER_SCHEDULE,
    trainers.train_citer,
    "Train CITER's network, first round (data: reference texts if there are any).",
)
_trainer(
    "collm",
    trainers.COLLM_SCHEDULE,
    lambda corpus, *how: trainers.train_collm(corpus, output_embedding(corpus.small), *how),
    "Fit Co-LLM's deferral row (data: reference texts if there are any).",
)


@app.command()
@refusals
def query(
    data: DataOption,
    output: OutputOption,
    share: Annotated[float, typer.Option(min=0, max=1, help="Of prompts for the large model.")] = 0.3,
    epochs: EpochsOption = None,
) -> None:
    """Train the query classifier (data: judged answers of both models)."""
    _refuse_foreign(output)
    _store(trainers.train_query(Corpus.load(data), share, _limited(trainers.QUERY_SCHEDULE, epochs)), output)


@app.command()
@refusals
def threshold(
    file: Annotated[Path, typer.Argument(exists=True, help="Router of kind r2r, citer or collm, in the repository.")],
    share: Annotated[float, typer.Option(min=0, max=1, help="Of tokens by the large model.")] = 0.3,
    value: Annotated[float | None, typer.Option(min=0, max=1, help="Store this one; nothing is run.")] = None,
    model_repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    entry: Annotated[str, typer.Option(help="Entry model.")] = "tokenrouter",
    problems: ProblemsOption = None,
    count: Annotated[int, typer.Option(min=1, help="Validation problems.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 160,
) -> None:
    """Choose the threshold by the large model's share of tokens in routed runs, and store it in the file.

    The trainers store the threshold by recall (R2R's rule).
    """
    kind = next((kind for kind in KINDS if _is_kind(file, kind)), KINDS[0])
    if value is None:
        prompts = [example.prompt for example in _examples(problems, count, demo_pair.VALIDATION_SEED)]
        value, found = demo_pair.search(model_repository, entry, file, kind, prompts, share, max_tokens)
        typer.echo(f"the large model writes {found:.1%} of the tokens at {value:.6f}")
    save_router(replace(load_router(file, kind), threshold=value), file)
    typer.echo(f"{file}: threshold {value:.6f}")


@app.command()
@refusals
def demo(
    model_repository: Annotated[Path, typer.Option(help="Model repository with the demo pair.")] = Path(
        "model_repository"
    ),
    count: Annotated[int, typer.Option(min=10, help="Training problems.")] = demo_pair.PROBLEMS,
    threads: ThreadsOption = 1,
) -> None:
    """Collect, train and choose thresholds for the demo pair; writes MODEL_REPOSITORY/tokenrouter/1/routers."""
    torch.set_num_threads(threads)
    for line in demo_pair.train_all(model_repository, count=count):
        typer.echo(line)


def _examples(problems: Path | None, count: int, seed: int) -> list[Example]:
    return demo_examples(count, seed) if problems is None else read_json_lines(problems, Example)[:count]


def _limited(schedule: Schedule, epochs: int | None) -> Schedule:
    return schedule if epochs is None else replace(schedule, epochs=epochs)


def _is_kind(file: Path, kind: str) -> bool:
    try:
        load_router(file, kind)
    except RouterError:
        return False
    return True


def _refuse_foreign(output: Path) -> None:
    """Only another router is overwritten."""
    if output.exists() and not any(_is_kind(output, kind) for kind in KINDS):
        raise CommandError(f"--output {output}: there is a file that is no router; name another file, or remove it")


def _store(trained: Trained, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    save_router(trained.router, output)
    typer.echo(demo_pair.report(trained, output))


if __name__ == "__main__":
    app()
