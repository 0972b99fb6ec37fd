"""Whose death a stub waits for; the death itself is tested with a real server."""

from __future__ import annotations

import pytest

from tokenrouter.triton.orphan import server_pid

STUB = ["stub", "/models/small/1/model.py", "tokenrouter-1_shm_region_a", "1048576", "1048576"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param([*STUB, "4711", "/opt/tritonserver"], 4711, id="given"),
        pytest.param([*STUB, "1", "/opt/tritonserver"], 1, id="the-server-is-init"),
        pytest.param(STUB, 99, id="left-out"),
        pytest.param([*STUB, "/opt/tritonserver"], 99, id="no-number"),
        pytest.param([*STUB, "0"], 99, id="no-process"),
    ],
)
def test_the_server_is_who_the_command_line_names_else_the_parent(arguments: list[str], expected: int) -> None:
    assert server_pid(arguments, parent=99) == expected
