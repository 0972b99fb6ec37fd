"""Command line: ``python -m tools.convert_router --from r2r CHECKPOINT --out router.safetensors``.

Converts a trained router from its source's format to ours. The checkpoint is checked against its architecture first; a
pickled file is read without executing anything in it.
"""

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tokenrouter.errors import RouterError
from tokenrouter.policies.checkpoints import RouterFile, citer, collm, r2r, save_router

app = typer.Typer(help=__doc__, add_completion=False)
console = Console()


class Source(str, Enum):
    """Formats that can be converted."""

    r2r = "r2r"
    citer = "citer"
    collm = "collm"


READERS = {
    Source.r2r: (r2r.read_official, r2r.build),
    Source.citer: (citer.read_official, citer.build),
    Source.collm: (collm.read_official, collm.build),
}


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(exists=True, help="Official file, or folder (collm).")],
    source: Annotated[Source, typer.Option("--from", help="Whose format it is.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    threshold: Annotated[float | None, typer.Option(min=0, max=1, help="Stored instead of the file's own.")] = None,
    models: Annotated[str | None, typer.Option(help="What it was trained for, small first: NAME,NAME.")] = None,
    drop_embedding: Annotated[
        bool,
        typer.Option("--drop-embedding", help="r2r: leave the token embedding out; the small model's own serves then."),
    ] = False,
) -> None:
    """Convert a router's checkpoint to the safetensors format."""
    if out.suffix != ".safetensors":
        raise typer.BadParameter(f"--out must end in .safetensors, not {out.suffix or 'nothing'}")
    read, build = READERS[source]
    try:
        router = read(checkpoint)
        if drop_embedding:
            router = _without_embedding(router)
        if threshold is not None:
            router = replace(router, threshold=threshold)
        if models is not None:
            router = replace(router, models=tuple(name.strip() for name in models.split(",")))
        build(router)
        out.parent.mkdir(parents=True, exist_ok=True)
        save_router(router, out)
    except RouterError as exc:
        console.print(str(exc), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from exc
    parameters = sum(tensor.numel() for tensor in router.tensors.values())
    stored = "none" if router.threshold is None else f"{router.threshold:g}"
    console.print(
        f"{out}: {router.kind} router, {parameters:,} values, threshold {stored}", markup=False, highlight=False
    )


def _without_embedding(router: RouterFile) -> RouterFile:
    """Equal to the file with the table where that was frozen in training (`freeze_lm_head`)."""
    return replace(router, tensors={name: t for name, t in router.tensors.items() if name != r2r.EMBEDDING})


if __name__ == "__main__":
    app()
