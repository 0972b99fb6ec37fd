"""A model for tests of servers as such: it echoes its input, on Triton's plain `python` backend, nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request

from tests.support.waiting import PATIENCE_S
from tokenrouter.direct_http import http_open
from tools.tritonserver.server import TritonServer

WriteModel = Callable[..., Path]
"""`write_model` for a repository of the test that asks for the fixture of this name."""

_ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}
{methods}
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


def write_model(repository: Path, name: str = "echo", *, initialize: str = "pass", methods: str = "") -> Path:
    """Adds a model that echoes its input, and returns the repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_ECHO.format(initialize=initialize, methods=methods))
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    return repository


def echo(server: TritonServer, text: str) -> str:
    """What the model answers."""
    request = Request(f"{server.http_url}/v2/models/echo/generate", json.dumps({"IN": text}).encode())
    with http_open(request, timeout=PATIENCE_S) as response:
        return str(json.load(response)["OUT"])
