"""What all unit tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import settings

# Properties try the same examples in every run, so that a test fails because of a change and not by chance.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def triton() -> Iterator[ModuleType]:
    """An empty `triton_python_backend_utils`, which exists in Triton's stubs only; what imports it is forgotten."""
    before = set(sys.modules)
    module = sys.modules["triton_python_backend_utils"] = ModuleType("triton_python_backend_utils")
    yield module
    for name in {name for name in sys.modules if name.startswith("tokenrouter.triton.")} - before:
        del sys.modules[name]
    del sys.modules["triton_python_backend_utils"]
