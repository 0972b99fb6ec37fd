"""Command line: ``python -m tools.convert_router --from r2r CHECKPOINT --output router.safetensors``.

Converts a trained router from its source's format to ours. The checkpoint is checked against its architecture first; a
pickled file is read without executing anything in it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tokenrouter.policies.checkpoints import RouterFile, citer, collm, r2r, save_router
from tools.errors import reported
from tools.targets import target_file

READERS = {
    "r2r": (r2r.read_official, r2r.build),
    "citer": (citer.read_official, citer.build),
    "collm": (collm.read_official, collm.build),
}


@reported()
def main(
    checkpoint: Annotated[Path, typer.Argument(exists=True, help="Official file, or folder (collm).")],
    source: Annotated[Literal["r2r", "citer", "collm"], typer.Option("--from", help="Whose format it is.")],
    output: Annotated[Path, typer.Option(help="The file to write.", callback=target_file(".safetensors"))],
    threshold: Annotated[float | None, typer.Option(min=0, max=1, help="Stored instead of the file's own.")] = None,
    models: Annotated[str | None, typer.Option(help="What it was trained for, small first: NAME,NAME.")] = None,
    drop_embedding: Annotated[
        bool,
        typer.Option("--drop-embedding", help="r2r: leave the token embedding out; the small model's own serves then."),
    ] = False,
) -> None:
    """Convert a router's checkpoint to the safetensors format."""
    read, build = READERS[source]
    router = read(checkpoint)
    if drop_embedding:
        router = _without_embedding(router)
    if threshold is not None:
        router = replace(router, threshold=threshold)
    if models is not None:
        router = replace(router, models=tuple(name.strip() for name in models.split(",")))
    build(router)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_router(router, output)
    parameters = sum(tensor.numel() for tensor in router.tensors.values())
    stored = "none" if router.threshold is None else f"{router.threshold:g}"
    typer.echo(f"{output}: {router.kind} router, {parameters:,} values, threshold {stored}")


def _without_embedding(router: RouterFile) -> RouterFile:
    """Equal to the file with the table where that was frozen in training (`freeze_lm_head`)."""
    return replace(router, tensors={name: t for name, t in router.tensors.items() if name != r2r.EMBEDDING})


if __name__ == "__main__":
    typer.run(main)
