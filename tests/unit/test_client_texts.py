"""Errors that reach clients name no path of the server, whatever raised them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenrouter.errors import RouterError
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import PolicyCache, PolicyContext
from tokenrouter.triton.paths import without_paths

ROOT = Path("/srv/models/repository")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/models/repository/a/1/r.pt: damaged", "a/1/r.pt: damaged"),
        (
            "policy cannot be built: OSError: [Errno 2] '/usr/lib/python3/x.py'",
            "policy cannot be built: OSError: [Errno 2] 'x.py'",
        ),
        ("in /srv/models/repository", "in the repository"),
        (
            "see https://example.org/a/b and 3/4, small/1/x, a//b",
            "see https://example.org/a/b and 3/4, small/1/x, a//b",
        ),
        ("(/tmp/run-1/small.sock)", "(small.sock)"),
    ],
)
def test_paths_of_the_server_are_left_out(text: str, told: str) -> None:
    assert without_paths(text, ROOT) == told


FILES = ["none.pt", "empty.pt", "noise.pt", "noise.safetensors", "noise.txt", "folder", "pointer.safetensors"]
POLICIES = [
    ("r2r", {}),
    ("citer", {}),
    ("collm", {}),
    *[("query_level", {"router": r}) for r in ("regex", "classifier", "bert")],
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(("name", "params"), POLICIES, ids=lambda value: str(value))
def test_no_damaged_router_tells_where_it_lies(tmp_path: Path, name: str, params: dict[str, str], file: str) -> None:
    (tmp_path / "empty.pt").touch()
    for path in ("noise.pt", "noise.safetensors", "noise.txt"):
        (tmp_path / path).write_bytes(b"(unbalanced \xff\x00" * 9)
    (tmp_path / "folder").mkdir()
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    spec = PolicySpec(name, json.dumps({**params, "checkpoint": file}))
    context = PolicyContext(("small", "large"), str(tmp_path))
    with pytest.raises(RouterError) as caught:
        PolicyCache(context, prepared_for="" if name == "query_level" else "small").get(spec)
    told = without_paths(str(caught.value), tmp_path)
    assert str(tmp_path) not in told
    assert "/site-packages" not in told


def test_only_listed_checkpoints_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.txt").write_text("prove")
    (tmp_path / "b.txt").write_text("prove")
    context = PolicyContext(("small", "large"), str(tmp_path), checkpoints=frozenset(["lists/a.txt"]))
    cache = PolicyCache(context, prepared_for="")

    def named(path: str) -> PolicySpec:
        return PolicySpec("query_level", json.dumps({"router": "regex", "checkpoint": path}))

    cache.get(named("lists/a.txt"))
    cache.get(named("lists/../lists/a.txt"))
    for path in ("b.txt", "lists", "none.txt", str(tmp_path / "b.txt")):
        with pytest.raises(RouterError, match=r"checkpoints that clients of this deployment may name: lists/a.txt"):
            cache.get(named(path))
    with pytest.raises(RouterError, match="outside"):
        cache.get(named("../b.txt"))
