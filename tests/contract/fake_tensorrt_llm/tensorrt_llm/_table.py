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
    kind = KEYWORD if surface.kind is facts.Kind.MODEL else POSITIONAL
    parameters = [inspect.Parameter("self", POSITIONAL)] if method else []
    for parameter in _confirmed(surface):
        if parameter.name.startswith("**"):
            parameters.append(inspect.Parameter(parameter.name[2:], inspect.Parameter.VAR_KEYWORD))
        else:
            parameters.append(inspect.Parameter(parameter.name, kind, default=parameter.default))
    return inspect.Signature(parameters)


def _confirmed(surface: facts.Surface) -> list[facts.Parameter]:
    return [parameter for parameter in surface.parameters if not parameter.unconfirmed]


def method(path: str) -> Callable[[Callable[[Any, dict[str, Any]], Any]], Callable[..., Any]]:
    """Decorator: the method gets its arguments as one dict, bound to the table's signature."""
    wanted = signature(path, method=True)

    def decorate(function: Callable[[Any, dict[str, Any]], Any]) -> Callable[..., Any]:
        def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = wanted.bind(self, *args, **kwargs)
            arguments.apply_defaults()
            return function(self, {name: value for name, value in arguments.arguments.items() if name != "self"})

        bound.__name__ = function.__name__
        bound.__signature__ = wanted  # type: ignore[attr-defined]
        return bound

    return decorate


def keyword_dataclass(path: str, *, module: str, bases: tuple[type, ...] = ()) -> Any:
    """The dataclass of a surface, keyword-only and with slots."""
    surface = facts.surface(path)
    return dataclasses.make_dataclass(
        surface.name,
        [(p.name, Any, dataclasses.field(default=p.default)) for p in _confirmed(surface)],
        bases=bases,
        namespace={"__module__": module},
        kw_only=True,
        slots=True,
    )


class Fields:
    """Base of objects that hold the fields of one surface of the table."""

    model_fields: ClassVar[dict[str, Any]]
    _error: ClassVar[type[Exception]]

    def __init_subclass__(cls, *, path: str, error: type[Exception] = ValueError) -> None:
        cls._error = error
        cls.__signature__ = signature(path)  # type: ignore[attr-defined]
        cls.model_fields = {p.name: p for p in _confirmed(facts.surface(path))}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            arguments = self.__signature__.bind(*args, **kwargs)  # type: ignore[attr-defined]
        except TypeError as exc:
            raise self._error(f"{type(self).__name__}: {exc}") from exc
        arguments.apply_defaults()
        self.__dict__.update(arguments.arguments)
