"""Parsers of a parameter's text; each raises ValueError, TypeError or KeyError for what it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TypeVar

import msgspec

from tokenrouter.channel.address import Address

T = TypeVar("T")


def json_as(type_: type[T]) -> Callable[[str], T]:
    """A parser of JSON that has this type."""
    return lambda text: msgspec.json.decode(text, type=type_)


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def ids(text: str) -> tuple[int, ...]:
    found = tuple(int(name) for name in names(text))
    if found and min(found) < 0:
        raise ValueError(text)
    return found


def boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def rejects(text: str) -> bool:
    return {"REJECT": True, "DELAY": False}[text]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise ValueError(text)
    return value


def json_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError(text)
    return text


def mebibytes(text: str) -> int:
    return positive(text) << 20


def paths(text: str) -> tuple[str, ...]:
    return checked_paths(msgspec.json.decode(text, type=tuple[str, ...]))


def checked_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The same. Raises ValueError for a path that is not one in the repository."""
    for path in paths:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"policy_checkpoints has {path!r}; name files in the repository, relative to it")
    return paths


def hosts(text: str) -> dict[str, Address]:
    found = msgspec.json.decode(text, type=dict[str, str])
    return {name: Address.parse(host) for name, host in found.items()}


def microseconds(text: str) -> int:
    return natural(text) * 1000


def seconds(text: str) -> int:
    return natural(text) * 10**9


def milliseconds(text: str) -> int:
    return positive(text) * 10**6
