"""What a command writes to, looked at before the work that would fill it."""

from __future__ import annotations

import os
from pathlib import Path


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
