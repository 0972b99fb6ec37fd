"""What an installed TensorRT-LLM offers, by inspection, beside the table in `engines.tensorrt_llm.facts`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenrouter.engines.tensorrt_llm.facts import REQUIRED, SURFACES, Kind, Parameter, Surface

# These are called with arguments by position: only how many there are counts, names are free.
_BY_POSITION = ("LogitsProcessor.__call__",)
_ASSIGNED = re.compile(r"\bself\.([A-Za-z]\w*)\s*(?::[^=\n]+)?=[^=]")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One surface of the table, compared.

    Attributes:
        surface: the table's entry.
        problem: why it cannot be used at all; empty if it is there.
        missing: names of the table that the installation lacks.
        new: names that the table does not know.
        changed: defaults that differ, as text.
    """

    surface: Surface
    problem: str = ""
    missing: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def essential(self) -> tuple[str, ...]:
        """What the adapter cannot do without, and what is not there."""
        if self.problem:
            return (self.problem,) if self.surface.essential else ()
        needed = {parameter.name for parameter in self.surface.parameters if parameter.essential}
        return tuple(name for name in self.missing if name in needed)


def compare(surfaces: Sequence[Surface] = SURFACES) -> list[Finding]:
    """Every surface of the table, in its order. Imports tensorrt_llm."""
    return [_compare(surface) for surface in surfaces]


def _compare(surface: Surface) -> Finding:
    try:
        found: Any = importlib.import_module(surface.module)
        for name in surface.name.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as exc:
        return Finding(surface, problem=f"not there: {exc}")
    if surface.kind is Kind.COROUTINE and not inspect.iscoroutinefunction(found):
        return Finding(surface, problem="not a coroutine function")
    if not surface.parameters or surface.kind is Kind.VALUE:
        return Finding(surface)
    if surface.name in _BY_POSITION:
        return _by_position(surface, found)
    try:
        offered = _OFFERED[surface.kind](found)
    except (TypeError, ValueError) as exc:
        return Finding(surface, problem=f"cannot be inspected: {exc}")
    return _by_name(surface, offered)


def _by_name(surface: Surface, offered: dict[str, Any]) -> Finding:
    wanted = {parameter.name.removeprefix("**"): parameter for parameter in surface.parameters}
    known = {name for name, parameter in wanted.items() if not parameter.unconfirmed}
    open_ended = surface.kind in (Kind.DATACLASS, Kind.CLASS)
    return Finding(
        surface,
        missing=tuple(wanted[name].name for name in wanted if name in known - offered.keys()),
        new=() if open_ended else tuple(name for name in offered if name not in wanted),
        changed=tuple(_changes(wanted, offered)),
    )


def _changes(wanted: dict[str, Parameter], offered: dict[str, Any]) -> Iterator[str]:
    for name, parameter in wanted.items():
        default = offered.get(name, _UNKNOWN)
        # Objects as defaults are factories or enumerations, which the table does not hold.
        plain = default is None or isinstance(default, bool | int | float | str)
        if plain and parameter.default is not REQUIRED and default != parameter.default:
            yield f"{name}={default!r} (was {parameter.default!r})"


def _by_position(surface: Surface, found: Any) -> Finding:
    parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
    names = tuple(p.name for p in parameters)
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if count != len(surface.parameters):
        return Finding(surface, problem=f"takes {count} positional arguments, not {len(surface.parameters)}: {names}")
    return Finding(surface, new=tuple(name for name in names if name not in surface.names))


class _Unknown:
    """A default that is not known."""


_UNKNOWN = _Unknown()


def _model(found: Any) -> dict[str, Any]:
    return {name: getattr(field, "default", _UNKNOWN) for name, field in found.model_fields.items()}


def _dataclass(found: Any) -> dict[str, Any]:
    fields = [field for field in dataclasses.fields(found) if field.init and not field.name.startswith("_")]
    return {field.name: field.default for field in fields}


def _call(found: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:
        return _from_text(found)
    if parameters and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return _from_text(found)
    return {p.name: p.default for p in parameters if p.name != "self"}


def _from_text(found: Any) -> dict[str, Any]:
    """Bindings of C++ classes have no signature, but their documentation begins with one.

    Raises:
        ValueError: it does not.
    """
    text = getattr(getattr(found, "__init__", None), "__doc__", None) or ""
    match = re.search(r"\(self(.*?)\)\s*->", text, re.DOTALL)
    if match is None:
        raise ValueError("neither a signature nor a documentation that begins with one")
    return dict.fromkeys(re.findall(r"(?:^|,)\s*([A-Za-z_]\w*)\s*:", match[1]), _UNKNOWN)


def _attributes(found: Any) -> dict[str, Any]:
    """Attributes of a class, fields included, and what its methods assign to self."""
    names = {name for name in dir(found) if not name.startswith("__")}
    for cls in inspect.getmro(found)[:-1]:
        names |= set(getattr(cls, "__annotations__", {}))
        try:
            names |= set(_ASSIGNED.findall(inspect.getsource(cls)))
        except (OSError, TypeError):
            continue
    return dict.fromkeys(sorted(names), _UNKNOWN)


def _members(found: Any) -> dict[str, Any]:
    return dict.fromkeys(found.__members__, _UNKNOWN)


_OFFERED: dict[Kind, Callable[[Any], dict[str, Any]]] = {
    Kind.MODEL: _model,
    Kind.DATACLASS: _dataclass,
    Kind.CONSTRUCTOR: _call,
    Kind.CALL: _call,
    Kind.COROUTINE: _call,
    Kind.CLASS: _attributes,
    Kind.ENUM: _members,
}
