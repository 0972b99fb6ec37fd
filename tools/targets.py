"""What commands write to, checked before the work that would fill it: callbacks of typer's options.

plot: Annotated[Path | None, typer.Option(help="Image to write.", callback=target_file(*IMAGE_SUFFIXES))] = None
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import typer

from tools.errors import REFUSED, complain

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
"""Formats of plots."""

Callback = Callable[[typer.CallbackParam, Path | None], Path | None]


def fault_of_file(path: Path, *suffixes: str) -> str | None:
    """Why this file cannot be written, or its name does not end as it must; None if all is well."""
    if suffixes and path.suffix not in suffixes:
        return f"the name must end in {' or '.join(suffixes)}"
    if path.is_dir():
        return "is a folder; name a file in it"
    if path.exists() and not os.access(path, os.W_OK):
        return "may not be written; name another file, or change its permissions"
    return fault_of_folder(path.absolute().parent)


def fault_of_folder(path: Path) -> str | None:
    """Why nothing can be written into this folder, which need not exist; None if all is well."""
    place = path.absolute()
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    if not existing.is_dir():
        return f"{existing} is no folder; name another place"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} may not be written to; name another place, or change its permissions"
    return None


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
