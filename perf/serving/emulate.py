"""`python -m perf.serving.emulate`: a model repository of emulated models with a profile's step times and routing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from perf.emulated.deployment import EmulatedDeployment
from tools.dtmc.errors import DtmcError
from tools.dtmc.profile import load_profile


def main(
    profile: Annotated[Path, typer.Option(help="Step times and routing (YAML).")],
    output: Annotated[Path, typer.Option(help="Folder of the model repository.")],
    inflight: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 64,
    policy: Annotated[str, typer.Option(help="markov, random or me.")] = "markov",
) -> None:
    """Writes the repository, with eager thresholds: what `make tune` starts from."""
    if output.exists():
        sys.exit(f"error: --output {output} exists; name a new folder")
    try:
        EmulatedDeployment(load_profile(profile), policy, inflight).write(output)
    except DtmcError as exc:
        sys.exit(f"error: {exc}")
    print(f"{output}: emulated; make serve MODEL_REPOSITORY={output}")


if __name__ == "__main__":
    typer.run(main)
