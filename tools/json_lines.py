"""Files of JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from tools.errors import CommandError

T = TypeVar("T")


def read_json_lines(path: Path, kind: type[T]) -> list[T]:
    """One object a line; empty lines do not count.

    Args:
        kind: a dataclass or struct.

    Raises:
        CommandError: the file cannot be read, or a line is no such object; names the file, the line and the field.
    """
    try:
        # Not splitlines(), which also splits at separators that JSON leaves unescaped in a string, as U+2028.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise CommandError(f"{path}: {getattr(exc, 'strerror', exc)}; give JSON lines with {_fields(kind)}") from exc
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=kind))
            except msgspec.MsgspecError as exc:
                raise CommandError(f"{path}:{number}: expected an object with {_fields(kind)}: {exc}") from exc
    return found


def _fields(kind: type) -> str:
    return ", ".join(kind.__annotations__)
