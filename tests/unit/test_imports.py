"""Who may import whom: the server nothing of tools, tools nothing of benchmarks, and nobody in a circle."""

from __future__ import annotations

import ast
import functools
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


class _Imports(ast.NodeVisitor):
    """Names that are imported anywhere in a module, in functions too, but not what only a type checker imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: set[str] = set()
        self.visit(tree)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "import modules by their full names"
        self.names.add(str(node.module))  # runs before its submodules
        self.names.update(f"{node.module}.{alias.name}" for alias in node.names)


def imports() -> dict[str, set[str]]:
    """What every module of ours imports of ours."""
    return {name: modules().keys() & _Imports(tree).names - {name} for name, tree in modules().items()}


def test_the_server_imports_no_tools_and_tools_import_no_benchmarks() -> None:
    layers = ("tokenrouter", "tools", "perf", "tests")
    for name, others in imports().items():
        allowed = layers[: layers.index(name.partition(".")[0]) + 1]
        wrong = {other for other in others if other.partition(".")[0] not in allowed}
        assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


def test_nobody_imports_in_a_circle() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as exc:
        raise AssertionError(f"import circle: {' <- '.join(exc.args[1])}") from None
