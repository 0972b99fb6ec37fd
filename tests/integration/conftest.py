"""The shared server, who watches it, and which tests may run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.echo import WriteModel, write_model
from tests.support.servers import offline, shared, shared_repository
from tests.support.watch import pytest_runtest_setup, pytest_runtest_teardown

__all__ = ["offline", "pytest_runtest_setup", "pytest_runtest_teardown", "shared", "shared_repository"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server stay on one worker and keep their order; see `--dist loadgroup`."""
    for item in items:
        if item.get_closest_marker("integration"):
            names = getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("shared" if "shared" in names else item.path.stem))


@pytest.fixture(name="write_model")
def _write_model(tmp_path: Path) -> WriteModel:
    """`write_model` for a repository of this test."""

    def write(name: str = "echo", **options: str) -> Path:
        return write_model(tmp_path / "repository", name, **options)

    return write
