"""The tables of facts, and the switches."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.double import double_environment
from tokenrouter.engines.tensorrt_llm import facts
from tokenrouter.engines.tensorrt_llm.behaviours import BEHAVIOURS


@pytest.mark.parametrize("surface", facts.SURFACES, ids=lambda surface: surface.path)
def test_the_double_has_what_the_table_lists(surface: facts.Surface) -> None:
    found: Any = importlib.import_module(surface.module)
    for name in surface.name.split("."):
        found = getattr(found, name)
    if surface.kind in (facts.Kind.CALL, facts.Kind.CONSTRUCTOR, facts.Kind.COROUTINE):
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        if "**kwargs" not in surface.names:
            assert tuple(names) == surface.names


def test_every_behaviour_is_pinned() -> None:
    named: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        module = importlib.import_module(f"tests.contract.{path.stem}")
        for function in vars(module).values():
            marks = getattr(function, "pytestmark", [])
            named.update(name for mark in marks if mark.name == "pins" for name in mark.args)
    assert named == set(BEHAVIOURS)


def test_switches_are_told_to_other_processes() -> None:
    code = "from tensorrt_llm import _behaviour; print(*sorted(_behaviour.broken_now()))"
    environment = {**double_environment(broken=["reuse", "salted"]), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == ["reuse", "salted"]
