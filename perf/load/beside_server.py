"""`python -m perf.load.beside_server -- COMMAND ...`: runs a command beside a server of its own, on free ports.

The command finds the server in the environment variables URL (gRPC), HTTP_URL and METRICS_URL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.tritonserver.installation import LaunchError
from tools.tritonserver.server import TritonServer


def main(
    command: Annotated[list[str], typer.Argument(help="After --: what to run.")],
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    timeout: Annotated[float, typer.Option(help="Seconds after which the command is ended.")] = 1800.0,
) -> None:
    """Starts the server, runs the command, stops the server; ends with the command's exit code."""
    try:
        with TritonServer(model_repository) as server:
            urls = {
                "URL": server.grpc_url,
                "HTTP_URL": server.http_url.removeprefix("http://"),
                "METRICS_URL": server.metrics_url,
            }
            code = subprocess.run(command, env={**os.environ, **urls}, timeout=timeout, check=False).returncode
    except (LaunchError, OSError, subprocess.TimeoutExpired) as exc:
        sys.exit(f"error: {exc}")
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
