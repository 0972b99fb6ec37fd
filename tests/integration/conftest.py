"""The shared server, who watches it, what may be left of it, and which tests may run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.echo import WriteModel, write_model
from tests.support.leftovers import nothing_left
from tests.support.servers import offline, shared, shared_repository
from tests.support.watch import pytest_runtest_setup, pytest_runtest_teardown

__all__ = ["nothing_left", "offline", "pytest_runtest_setup", "pytest_runtest_teardown", "shared", "shared_repository"]


# What waits longest for servers of its own; the files of the shared server fill the gaps at the end.
_LONGEST_FIRST = (
    "test_server_tensorrt_llm",
    "test_readme",
    "test_server_lifecycle",
    "test_launcher",
    "test_container_serve",
    "test_standard_baseline",
    "test_scheduling",
    "test_harness",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which workers get files (`--dist loadscope --no-loadscope-reorder`)."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(name="write_model")
def _write_model(tmp_path: Path) -> WriteModel:
    """`write_model` for a repository of this test."""

    def write(name: str = "echo", **options: str) -> Path:
        return write_model(tmp_path / "repository", name, **options)

    return write
