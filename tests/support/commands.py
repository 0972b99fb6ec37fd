"""Runs commands in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner


def run(command: typer.Typer | Callable[..., Any], *arguments: object) -> Result:
    """A command line, or the function of its only command; a fault of ours is raised again."""
    if not isinstance(command, typer.Typer):
        app = typer.Typer()
        app.command()(command)
        command = app
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
