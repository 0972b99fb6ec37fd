"""`python -m perf.serving.emulate`: a model repository of emulated models with a profile's step times and routing.

Thresholds are eager: what `make tune` starts from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.emulated.deployment import EmulatedDeployment
from perf.emulated.routing import FOLLOWING
from tokenrouter.speculation import Speculation
from tools.dtmc.profile import load_profile
from tools.errors import CommandError
from tools.targets import target_folder


def main(
    profile: Annotated[Path, typer.Option(help="Step times and routing (YAML).")],
    output: Annotated[Path, typer.Option(help="Folder of the model repository.", callback=target_folder())],
    inflight: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 64,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(FOLLOWING)}.")] = "markov",
    agreement: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of tokens that agree.")] = None,
    speculation: Annotated[int, typer.Option(min=0, help="Guesses that the small model may hold; 0 = none.")] = 0,
) -> None:
    if output.exists():
        raise CommandError(f"--output {output} exists; name a new folder")
    ahead = Speculation(speculation) if speculation else None
    EmulatedDeployment(load_profile(profile), policy, inflight, agreement=agreement, speculation=ahead).write(output)
    print(f"{output}: emulated; make serve MODEL_REPOSITORY={output}")


if __name__ == "__main__":
    run(main)
