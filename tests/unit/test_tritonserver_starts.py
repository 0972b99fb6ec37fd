"""A tritonserver that loses a lock while it starts is started again; one that ends for another reason is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.tritonserver import server as module
from tools.tritonserver.installation import Installation, LaunchError
from tools.tritonserver.server import TritonServer


@pytest.mark.parametrize(("last_words", "starts"), [("boost::interprocess::lock_exception", 3), ("no such model", 1)])
def test_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: str, starts: int) -> None:
    counted = tmp_path / "counted"
    binary = tmp_path / "tritonserver"
    binary.write_text(f"#!/bin/sh\necho started >> {counted}\necho '{last_words}'\nkill -ABRT $$\n")
    binary.chmod(0o755)
    monkeypatch.setattr(module, "find_installation", lambda: Installation(binary, (), (), "a test"))
    (tmp_path / "repository").mkdir()
    with pytest.raises(LaunchError, match="ended before it was ready"):
        TritonServer(tmp_path / "repository").start()
    assert counted.read_text().count("started") == starts
