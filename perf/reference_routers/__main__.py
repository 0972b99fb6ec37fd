"""`python -m perf.reference_routers --source PATH [PATH ...]`: our routers beside their authors' code, as a table.

A checkout of each repository is needed; what is compared and how: the package's text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging

from perf.command import run
from perf.reference_routers import citer, collm, glimprouter, r2r_strategies, vectors
from perf.reference_routers.imports import torchvision_mlp
from perf.reference_routers.rows import Finding
from tools.errors import CommandError
from tools.markdown import markdown
from tools.targets import target_file

# A file that tells the repository -> what compares it.
SOURCES: dict[str, Callable[[Path, Path], Iterator[Finding]]] = {
    "r2r/models/router.py": r2r_strategies.compare,
    "src/models/conf_model.py": citer.compare,
    "collm/generate.py": collm.compare,
    "src/glimp_router.py": glimprouter.compare,
}
COLUMNS = ["source", "class, strategy or function", "settings", "compared", "largest difference", "other decisions"]


def shown(finding: Finding) -> list[str]:
    """A line of the table."""
    difference = "" if finding.difference is None else f"{finding.difference:.1g}"
    different = "" if finding.different is None else str(finding.different)
    return [finding.source, finding.what, finding.settings, str(finding.compared), difference, different]


def comparison(source: Path) -> Callable[[Path, Path], Iterator[Finding]]:
    """What compares this repository.

    Raises:
        CommandError: it is none of those that are known.
    """
    for path, compare in SOURCES.items():
        if (source / path).is_file():
            return compare
    raise CommandError(f"--source {source} has none of {', '.join(SOURCES)}; give a checkout of an authors' repository")


def main(
    source: Annotated[list[Path], typer.Option(exists=True, file_okay=False, help="Checkouts of the authors' code.")],
    torchvision: Annotated[Path | None, typer.Option(exists=True, help="Folder with torchvision, for CITER.")] = None,
    write: Annotated[
        Path | None, typer.Option("--vectors", help="Write R2R's test values.", callback=target_file())
    ] = None,
) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torchvision_mlp(torchvision)
    comparisons = [(each, comparison(each)) for each in source]
    with tempfile.TemporaryDirectory() as folder:
        if write is not None:
            theirs = next((each for each, compare in comparisons if compare is r2r_strategies.compare), None)
            if theirs is None:
                raise CommandError("--vectors needs a checkout of R2R among --source")
            vectors.write(theirs, Path(folder), write)
            return
        found = [finding for each, compare in comparisons for finding in compare(each, Path(folder))]
    typer.echo(markdown(COLUMNS, map(shown, found)))


if __name__ == "__main__":
    run(main)
