"""`python -m perf.load.beside_server -- COMMAND ...`: runs a command beside a server of its own, on free ports.

The command finds the server in the environment variables URL (gRPC), HTTP_URL and METRICS_URL. Ends with its exit code.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from tools.tritonserver.server import TritonServer


def main(
    command: Annotated[list[str], typer.Argument(help="After --: what to run.")],
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    timeout: Annotated[float, typer.Option(help="Seconds after which the command is ended.")] = 1800.0,
) -> None:
    with TritonServer(model_repository) as server:
        urls = {
            "URL": server.grpc_url,
            "HTTP_URL": server.http_url.removeprefix("http://"),
            "METRICS_URL": server.metrics_url,
        }
        ended = subprocess.run(command, env={**os.environ, **urls}, timeout=timeout, check=False)
    raise typer.Exit(ended.returncode)


if __name__ == "__main__":
    run(main, subprocess.TimeoutExpired)
