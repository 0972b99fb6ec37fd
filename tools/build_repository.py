"""`python -m tools.build_repository`: one YAML file -> a complete Triton model repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenrouter.errors import ConfigError
from tools.repository.build import repository_files, write_repository
from tools.repository.spec import load_spec


def build(
    config: Annotated[Path, typer.Option(help="The deployment's YAML file.")],
    output: Annotated[Path, typer.Option(help="Folder of the model repository.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files instead of writing them.")] = False,
) -> None:
    """Builds a model repository."""
    try:
        spec = load_spec(config)
        files = repository_files(spec)
    except ConfigError as exc:
        sys.exit(f"error: {exc}")
    if dry_run:
        for relative, text in files.items():
            print(f"--- {output / relative}\n{text}")
        return
    for path in write_repository(spec, output):
        print(path)


if __name__ == "__main__":
    typer.run(build)
