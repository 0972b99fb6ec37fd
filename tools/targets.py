"""What commands write to, checked before the work that would fill it: callbacks of typer's options.

plot: Annotated[Path | None, typer.Option(help="Image to write.", callback=target_file(*IMAGE_SUFFIXES))] = None
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from tokenrouter.targets import fault_of_file, fault_of_folder
from tools.errors import REFUSED, complain

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
"""Formats of plots."""

Callback = Callable[[typer.CallbackParam, Path | None], Path | None]


def target_file(*suffixes: str) -> Callback:
    """Callback of an option that names a file to write; refuses in one line, with exit code 2."""
    return _refusing(lambda path: fault_of_file(path, *suffixes))


def target_folder() -> Callback:
    """Callback of an option that names a folder to fill; refuses in one line, with exit code 2."""
    return _refusing(fault_of_folder)


def _refusing(fault_of: Callable[[Path], str | None]) -> Callback:
    def check(param: typer.CallbackParam, value: Path | None) -> Path | None:
        fault = None if value is None else fault_of(value)
        if fault is not None:
            complain(f"{param.opts[0]} {value}: {fault}")
            raise typer.Exit(REFUSED)
        return value

    return check
