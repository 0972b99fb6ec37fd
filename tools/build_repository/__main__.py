"""`python -m tools.build_repository`: one YAML file -> a complete Triton model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tokenrouter.checkpoint import end_ids
from tokenrouter.config.model_yaml import VERSION_FOLDER
from tokenrouter.errors import ConfigError
from tools.build_repository.arguments import with_arguments
from tools.build_repository.build import BUILT, built_deployment, repository_files, tree, write_repository
from tools.build_repository.check import checked
from tools.build_repository.kv_budget import host_budgets, tables
from tools.build_repository.spec import DeploymentSpec, load_spec
from tools.build_repository.tuning import kept, undone
from tools.errors import reported
from tools.targets import target_folder


@reported()
def build(
    config: Annotated[Path, typer.Option(help="The deployment's YAML file.")],
    output: Annotated[Path, typer.Option(help="Folder of the model repository.", callback=target_folder())],
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder of checkpoints and routers; overrides TOKENROUTER_CHECKPOINTS and the file's own."),
    ] = None,
    overlay: Annotated[
        Path | None, typer.Option(help="YAML file whose fields replace those of --config, or join them.")
    ] = None,
    keep_tuning: Annotated[
        bool | None,
        typer.Option(
            "--keep-tuning/--drop-tuning",
            help="Whether thresholds that were tuned in the output folder stay. Without it, they are not undone.",
            show_default=False,
        ),
    ] = None,
    without_weights: Annotated[
        bool, typer.Option("--without-weights", help="Accept checkpoints whose weights are not there yet.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files instead of writing them.")] = False,
) -> None:
    """Builds a model repository. Nothing is written before everything is checked."""
    spec = load_spec(config, checkpoints, overlay)
    finished = checked(spec, output, weights=not without_weights)
    if (output / BUILT).is_file():
        finished = _tuned(built_deployment(output), finished, output, keep_tuning)
    budgets = host_budgets(with_arguments(spec))
    if dry_run:
        print(f"{output}/\n{tree(finished)}\n")
        for relative, text in repository_files(finished).items():
            if text:
                print(f"--- {output / relative}\n{text}")
    else:
        for path in write_repository(finished, output):
            print(path)
        _remind(finished, output)
    for budget in budgets:
        for table in tables(budget):
            Console().print(table)
    if dry_run:
        print(_summary(finished, output))


def _summary(spec: DeploymentSpec, output: Path) -> str:
    """What a dry run found."""
    models = ", ".join(f"{name} ({model.engine})" for name, model in spec.models.items())
    state = "would change" if _differs(spec, output) else "is up to date"
    there = f"; {output} {state}" if (output / BUILT).is_file() else ""
    files = len(repository_files(spec))
    return (
        f"dry run: all checks passed, nothing was written. {files} files, policy {spec.entry.policy}, {models}{there}"
    )


def _differs(spec: DeploymentSpec, output: Path) -> bool:
    files = {output / relative: text for relative, text in repository_files(spec).items() if text}
    return any(not path.is_file() or path.read_text("utf-8") != text for path, text in files.items())


def _tuned(old: DeploymentSpec, new: DeploymentSpec, output: Path, keep: bool | None) -> DeploymentSpec:
    """The new deployment, with or without what was tuned since the old one was built."""
    names = undone(old, new)
    if names and keep is None:
        raise ConfigError(
            f"{output / BUILT}: the thresholds of {', '.join(names)} were tuned there, and building would undo that; "
            "--keep-tuning keeps them, --drop-tuning takes those of the YAML file"
        )
    return kept(old, new) if keep else new


def _remind(spec: DeploymentSpec, output: Path) -> None:
    for name, model in spec.models.items():
        folder = _folder(spec, output, name)
        if model.checkpoint == VERSION_FOLDER and not (folder / "config.json").is_file():
            print(f"note: put the checkpoint of {name} into {folder}")
    first = _folder(spec, output, next(iter(spec.models)))
    if spec.entry.end_ids is None and (first / "config.json").is_file() and not end_ids(first):
        print(
            f"note: no file of {first} names an end of responses; they end at their limits only, or name entry.end_ids"
        )


def _folder(spec: DeploymentSpec, output: Path, name: str) -> Path:
    checkpoint = spec.models[name].checkpoint
    return output / name / "1" if checkpoint == VERSION_FOLDER else Path(checkpoint)


if __name__ == "__main__":
    typer.run(build)
