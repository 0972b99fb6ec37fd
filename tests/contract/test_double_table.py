"""The table of facts, the stubs written from it, and the switches.."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm import _behaviour

from tests.contract import stubs
from tests.contract.double import DOUBLE, double_environment
from tokenrouter.engines.tensorrt_llm import facts


def test_the_stubs_are_written_from_the_table() -> None:
    for path, content in stubs.stub_files().items():
        assert path.read_text() == content, f"{path} is old; run python -m tests.contract.stubs"
    assert set(DOUBLE.rglob("*.pyi")) == set(stubs.stub_files())


@pytest.mark.parametrize("surface", facts.SURFACES, ids=lambda surface: surface.path)
def test_the_double_has_what_the_table_lists(surface: facts.Surface) -> None:
    __import__(surface.module)
    found: Any = sys.modules[surface.module]
    for name in surface.name.split("."):
        found = getattr(found, name)
    if surface.kind in (facts.Kind.CALL, facts.Kind.CONSTRUCTOR, facts.Kind.COROUTINE):
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        if "**kwargs" not in surface.names:
            assert tuple(names) == surface.names


def test_every_behaviour_is_pinned() -> None:
    named: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for marks in re.findall(r"mark\.pins\(([^)]*)\)", path.read_text()):
            named.update(re.findall(r'"(\w+)"', marks))
    assert named == set(_behaviour.SWITCHES)


def test_switches_are_told_to_other_processes() -> None:
    code = "from tensorrt_llm import _behaviour; print(*sorted(_behaviour.broken_now()))"
    environment = {**double_environment(broken=["reuse", "salted"]), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == ["reuse", "salted"]


def test_nothing_imports_tensorrt_llm_by_itself() -> None:
    code = (
        "import pkgutil, importlib, sys, tokenrouter\n"
        "for module in pkgutil.walk_packages(tokenrouter.__path__, 'tokenrouter.'):\n"
        "    if module.name.split('.')[1] != 'triton': importlib.import_module(module.name)\n"
        "assert 'tensorrt_llm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
