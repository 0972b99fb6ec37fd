"""KV budget of models that share GPUs: `python -m tools.kv_budget --config FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tools.build_repository.arguments import with_arguments
from tools.build_repository.kv_budget import deployment_budget, tables
from tools.build_repository.spec import load_spec
from tools.errors import reported


@reported()
def main(
    config: Annotated[Path, typer.Option(help="The deployment's YAML file.")],
    checkpoints: Annotated[Path | None, typer.Option(help="Folder of the checkpoints.")] = None,
) -> None:
    """Prints the KV budget of a deployment; all sizes are per GPU."""
    console = Console()
    budget = deployment_budget(with_arguments(load_spec(config, checkpoints)))
    if budget is None:
        console.print("no model names its GPUs, so there is nothing to share")
        return
    for table in tables(budget):
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
