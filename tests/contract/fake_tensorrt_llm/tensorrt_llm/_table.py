"""Builds classes and signatures from the table of facts, so that the double accepts what the table lists, no more."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from tokenrouter.engines.tensorrt_llm import facts

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def signature(path: str, *, method: bool = False) -> inspect.Signature:
    """The signature of a callable of the table, `self` first for a method."""
    surface = facts.surface(path)
    kind = KEYWORD if surface.kind in (facts.Kind.MODEL, facts.Kind.DATACLASS) else POSITIONAL
    parameters = [inspect.Parameter("self", POSITIONAL)] if method else []
    for parameter in surface.parameters:
        if parameter.unsure:
            continue
        if parameter.name.startswith("**"):
            parameters.append(inspect.Parameter(parameter.name[2:], inspect.Parameter.VAR_KEYWORD))
        else:
            parameters.append(inspect.Parameter(parameter.name, kind, default=parameter.default))
    return inspect.Signature(parameters)


def method(path: str) -> Callable[[Callable[[Any, dict[str, Any]], Any]], Callable[..., Any]]:
    """Decorator: the method gets its arguments as one dict, bound to the table's signature."""
    wanted = signature(path, method=True)

    def decorate(function: Callable[[Any, dict[str, Any]], Any]) -> Callable[..., Any]:
        def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = wanted.bind(self, *args, **kwargs)
            arguments.apply_defaults()
            return function(self, {name: value for name, value in arguments.arguments.items() if name != "self"})

        bound.__name__ = function.__name__
        bound.__doc__ = function.__doc__
        bound.__signature__ = wanted  # type: ignore[attr-defined]
        return bound

    return decorate


def keyword_dataclass(path: str, *, module: str, bases: tuple[type, ...] = ()) -> Any:
    """The dataclass of a surface, keyword-only and with slots."""
    surface = facts.surface(path)
    return dataclasses.make_dataclass(
        surface.name,
        [(p.name, Any, dataclasses.field(default=p.default)) for p in surface.parameters if not p.unsure],
        bases=bases,
        namespace={"__module__": module, "__doc__": f"Fields as listed for {path}."},
        kw_only=True,
        slots=True,
    )


class Fields:
    """Base of objects that hold the fields of one surface of the table."""

    model_fields: ClassVar[dict[str, Any]]
    _path: ClassVar[str]
    _error: ClassVar[type[Exception]]

    def __init_subclass__(cls, *, path: str, error: type[Exception] = ValueError) -> None:
        cls._path = path
        cls._error = error
        cls.__signature__ = signature(path)  # type: ignore[attr-defined]
        cls.model_fields = {p.name: p for p in facts.surface(path).parameters if not p.unsure}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            arguments = self.__signature__.bind(*args, **kwargs)  # type: ignore[attr-defined]
        except TypeError as exc:
            raise self._error(f"{type(self).__name__}: {exc}") from exc
        arguments.apply_defaults()
        self.__dict__.update(arguments.arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__
