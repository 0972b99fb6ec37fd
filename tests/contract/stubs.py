"""Type stubs of the double, written from the table of facts.

    python -m tests.contract.stubs

writes them beside the double; a test keeps them equal to the table. With them mypy checks the adapter against what the
table says of TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.contract.double import DOUBLE
from tokenrouter.engines.tensorrt_llm.facts import EXPORTS, REQUIRED, SURFACES, Kind, Parameter, Surface

HEADER = '''"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
'''
INDENT = "    "
TYPE_VARIABLE = '\n_Class = TypeVar("_Class", bound=type)\n'


def stub_files() -> dict[Path, str]:
    """Path and content of every stub file."""
    modules = sorted({surface.module for surface in SURFACES} | set(EXPORTS))
    contents = {_path(module, modules): _module(module) for module in modules}
    for module in modules:
        package = module.rpartition(".")[0]
        while package:
            contents.setdefault(_path(package, modules), "")
            package = package.rpartition(".")[0]
    return contents


def _path(module: str, modules: Iterable[str]) -> Path:
    path = DOUBLE.joinpath(*module.split("."))
    return path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")


def _module(module: str) -> str:
    own = [surface for surface in SURFACES if surface.module == module]
    body = "".join(_surface(surface, own) for surface in own if "." not in surface.name)
    exports = [path.rpartition(".") for path in EXPORTS.get(module, ())]
    needed = {(surface.module, surface.name) for surface in SURFACES if _used(surface, body)}
    lines = [f"from {origin} import {name} as {name}\n" for origin, _, name in exports]
    lines += [f"from {origin} import {name}\n" for origin, name in sorted(needed) if origin != module]
    lines = [line for line in lines if line.split()[-1] not in {name for _, _, name in exports} or " as " in line]
    variable = TYPE_VARIABLE if "_Class" in body else ""
    return HEADER + "".join(dict.fromkeys(lines)) + variable + body


def _used(surface: Surface, body: str) -> bool:
    return surface.name.isidentifier() and re.search(rf"\b{surface.name}\b", body) is not None


def _surface(surface: Surface, others: list[Surface], depth: int = 0) -> str:
    """A class with its members, or a function."""
    name = surface.name.rpartition(".")[2]
    if surface.kind in (Kind.CALL, Kind.COROUTINE):
        return _function(name, surface, depth, method=depth > 0)
    if surface.kind is Kind.VALUE:
        return f"\n{name}: {surface.returns}\n"
    pad = INDENT * depth
    base = f"({surface.base})" if surface.base else ""
    lines = [f"\n{pad}class {name}{base}:\n"]
    if surface.kind is Kind.ENUM:
        lines += [f"{pad}{INDENT}{p.name} = {p.default!r}\n" for p in surface.parameters]
    elif surface.kind is not Kind.CONSTRUCTOR:
        lines += [f"{pad}{INDENT}{p.name}: {p.annotation}\n" for p in surface.parameters if not p.unsure]
    if surface.kind in (Kind.MODEL, Kind.DATACLASS, Kind.CONSTRUCTOR):
        lines.append(_function("__init__", surface, depth + 1, method=True))
    prefix = f"{surface.name}."
    for other in others:
        if other.name.startswith(prefix) and "." not in other.name.removeprefix(prefix):
            lines.append(_surface(other, others, depth + 1))
    return "".join([*lines, f"{pad}{INDENT}...\n"] if len(lines) == 1 else lines)


def _function(name: str, surface: Surface, depth: int, *, method: bool) -> str:
    pad = INDENT * depth
    parameters = ["self"] if method else []
    if surface.kind in (Kind.MODEL, Kind.DATACLASS):
        parameters.append("*")
    parameters += [_parameter(parameter) for parameter in surface.parameters if not parameter.unsure]
    decorator = f"{pad}@abstractmethod\n" if name == "__call__" else ""
    word = "async def" if surface.kind is Kind.COROUTINE else "def"
    joined = "".join(f"\n{pad}{INDENT}{parameter}," for parameter in parameters)
    return f"{decorator}{pad}{word} {name}({joined}\n{pad}) -> {surface.returns}: ...\n"


def _parameter(parameter: Parameter) -> str:
    default = "" if parameter.default is REQUIRED else " = ..."
    return f"{parameter.name}: {parameter.annotation}{default}"


def main() -> None:
    """Writes the files."""
    for path, content in stub_files().items():
        path.write_text(content)


if __name__ == "__main__":
    main()
