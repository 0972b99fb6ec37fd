"""Who may import whom: the server nothing of tools, tools nothing of benchmarks, and nobody in a circle."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"tokenrouter": ROOT / "backends" / "tokenrouter_python", "tools": ROOT, "perf": ROOT, "tests": ROOT}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module by name; a package's is that of its __init__.py."""
    found = {}
    for top, folder in SOURCES.items():
        for path in sorted((folder / top).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of our modules that are imported anywhere in a module, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import modules by their full names"
            yield str(node.module)  # runs before its submodules
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports() -> dict[str, set[str]]:
    """What every module of ours imports of ours."""
    return {name: modules().keys() & set(imported(tree)) - {name} for name, tree in modules().items()}


def test_the_server_imports_no_tools_and_tools_import_no_benchmarks() -> None:
    layers = ("tokenrouter", "tools", "perf", "tests")
    for name, others in imports().items():
        allowed = layers[: layers.index(name.partition(".")[0]) + 1]
        wrong = {other for other in others if other.partition(".")[0] not in allowed}
        assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


def test_nobody_imports_in_a_circle() -> None:
    graph = imports()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        raise AssertionError(f"import circle: {' <- '.join(exc.args[1])}") from None
