"""Files of JSON lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from tools.errors import CommandError

T = TypeVar("T")


def read_json_lines(path: Path, kind: type[T]) -> list[T]:
    """One object a line; empty lines do not count. A number where a text belongs is the text that it is written as.

    Args:
        kind: a dataclass or struct.

    Raises:
        CommandError: the file cannot be read, or a line is no such object; names the file, the line and the field.
    """
    try:
        # Not splitlines(), which also splits at separators that JSON leaves unescaped in a string, as U+2028.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise CommandError(f"{path}: {getattr(exc, 'strerror', exc)}; give JSON lines with {_fields(kind)}") from exc
    found, texts = [], [name for name, hint in get_type_hints(kind).items() if hint in (str, str | None)]
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(msgspec.convert(_as_text(msgspec.json.decode(line), texts), kind))
            except msgspec.MsgspecError as exc:
                raise CommandError(f"{path}:{number}: expected an object with {_fields(kind)}: {exc}") from exc
    return found


def _as_text(record: Any, names: Iterable[str]) -> Any:
    """The record with numbers in these fields as text: an answer may be written 59 or "59"."""
    if isinstance(record, dict):
        for name in names:
            if type(record.get(name)) in (int, float):
                record[name] = str(record[name])
    return record


def _fields(kind: type) -> str:
    return ", ".join(kind.__annotations__)
