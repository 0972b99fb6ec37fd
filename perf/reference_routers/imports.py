"""Imports the authors' modules where not all that they import is installed; see the package's text."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Nothing(types.ModuleType):
    """A module whose every attribute is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(*names: str) -> list[str]:
    """Empty modules for those that are not installed, parents first; the names of these."""
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = _Nothing(name)
            missing.append(name)
    return missing


def at(folder: Path) -> None:
    """Modules are found in this folder first. Nothing is fetched by whoever is imported from it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(folder.resolve()))


def without_refusals(name: str, path: Path, classes: Sequence[str]) -> Any:
    """The module of a file, in which the constructors of these classes do not raise NotImplementedError.

    Raises:
        LookupError: one of them has no such statement.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    left = set(classes)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in left:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    kept = [line for line in method.body if not _refuses(line)]
                    left -= {node.name} if len(kept) < len(method.body) else set()
                    method.body = kept
    if left:
        raise LookupError(f"{path}: no constructor of {', '.join(sorted(left))} that raises NotImplementedError")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def _refuses(line: ast.stmt) -> bool:
    return isinstance(line, ast.Raise) and "NotImplementedError" in ast.unparse(line)


def torchvision_mlp(folder: Path | None) -> None:
    """Makes `from torchvision.ops import MLP` work.

    Args:
        folder: where torchvision lies, to read that class without its compiled operators, which need the same build of
            torch; None: it is installed and loads.
    """
    if folder is not None:
        for name in ("torchvision", "torchvision.ops"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]
        misc = importlib.import_module("torchvision.ops.misc")
        sys.modules["torchvision.ops"].MLP = misc.MLP  # type: ignore[attr-defined]
