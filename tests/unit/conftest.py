"""What all unit tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.unit.loops_server import Server

# Properties try the same examples in every run, so that a test fails because of a change and not by chance, nor because
# the machine is busy.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For rows so narrow that a second thread only makes steps wait for it."""
    import torch  # seconds, which other tests need not wait

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for router files."""
    return str(tmp_path_factory.mktemp("routers"))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes deployments of loops in this process, which end with the test."""
    from tests.unit.loops_server import running  # much, which other tests need not wait for

    with running(tmp_path) as start:
        yield start
