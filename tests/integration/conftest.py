"""Shared servers; model repositories for tests of the launcher (Triton's plain `python` backend, nothing of ours)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers import offline, shared, shared_repository

__all__ = ["offline", "shared", "shared_repository"]

_ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in inputs]
"""

_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "IN", data_type: TYPE_STRING, dims: [ 1 ] } ]
output [ { name: "OUT", data_type: TYPE_STRING, dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""

WriteModel = Callable[..., Path]


def write_model(repository: Path, name: str = "echo", *, initialize: str = "pass") -> Path:
    """Adds a model that echoes its input, and returns the repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_ECHO.format(initialize=initialize))
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    return repository


@pytest.fixture(name="write_model")
def _write_model(tmp_path: Path) -> WriteModel:
    """`write_model` for a repository of this test."""

    def write(name: str = "echo", **options: str) -> Path:
        return write_model(tmp_path / "repository", name, **options)

    return write
