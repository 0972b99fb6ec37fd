"""The shared server, who watches it, what may be left of it, and which tests may run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.echo import WriteModel, write_model
from tests.support.leftovers import nothing_left
from tests.support.servers import offline, shared, shared_repository
from tests.support.watch import pytest_runtest_setup, pytest_runtest_teardown

__all__ = ["nothing_left", "offline", "pytest_runtest_setup", "pytest_runtest_teardown", "shared", "shared_repository"]


_LONGEST_FIRST = ("shared", "test_server_tensorrt_llm", "test_server_lifecycle", "test_scheduling", "test_readme")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server stay on one worker and keep their order (`--dist loadgroup`); the long groups come first."""
    here = [item for item in items if item.get_closest_marker("integration")]
    for item in here:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    ranks = {group: rank for rank, group in enumerate(_LONGEST_FIRST)}
    here.sort(key=lambda item: ranks.get(_group(item), len(ranks)))
    items[:] = [item for item in items if item not in here] + here


def _group(item: pytest.Item) -> str:
    """Whose server a test uses: the shared one, its file's, or (with a model repository of its own) one of its own."""
    names = getattr(item, "fixturenames", ())
    if "shared" in names:
        return "shared"
    return "" if "write_model" in names else item.path.stem


@pytest.fixture(name="write_model")
def _write_model(tmp_path: Path) -> WriteModel:
    """`write_model` for a repository of this test."""

    def write(name: str = "echo", **options: str) -> Path:
        return write_model(tmp_path / "repository", name, **options)

    return write
