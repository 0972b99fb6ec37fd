"""Deployments on several hosts: what the builder refuses and writes, and what a repository says of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import run
from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.errors import ConfigError
from tokenrouter.repository import Repository
from tools.build_repository.__main__ import build
from tools.build_repository.build import built_deployment
from tools.build_repository.spec import load_spec
from tools.launch.remote import needed, replicas, wait, with_names

PEERS = {"peers": ["entry.example"]}


def deployment(folder: Path, *, tls: Any = PEERS, entry: Any = None, **large: Any) -> Path:
    content: dict[str, Any] = {
        "entry": {"policy": "single", "aliases": {}, **(entry or {})},
        "models": {name: {"engine": "emulated", "options": {"step_ms": 1.0}} for name in ("small", "large")},
    }
    content["models"]["large"].update(large)
    if tls is not None:
        content["tls"] = tls
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def built(folder: Path, **options: Any) -> Repository:
    result = run(build, "--config", deployment(folder, **options), "--output", folder / "repository")
    assert result.exit_code == 0, result.output
    return Repository(folder / "repository")


def test_what_is_written_is_what_both_sides_read(tmp_path: Path) -> None:
    entry = {"routed_orchestrators": 3, "unary": "unary"}
    repository = built(tmp_path, host="gpu-b.example", listen="0.0.0.0", entry=entry)
    address, tls = Address("gpu-b.example", 8004), TlsSettings(peers=("entry.example",))
    for name in ("tokenrouter", "unary"):
        assert repository.entry(name).hosts == {"large": address}
        assert repository.entry(name).tls == tls
    large, small = repository.model("large"), repository.model("small")
    assert (large.host, large.listen, large.tls) == (address, Address("0.0.0.0", 8004), tls)
    assert (large.routed_orchestrators, small.routed_orchestrators) == (3, 3)
    assert small.host is None
    assert built_deployment(repository.root).models["large"].host == "gpu-b.example"
    assert built_deployment(repository.root).tls == tls


def test_replicas_have_a_host_each(tmp_path: Path) -> None:
    repository = built(tmp_path, host=["a:1", "b"], replicas=2)
    assert repository.entry().hosts == {"large": Address("a", 1), "large_1": Address("b", 8004)}
    assert [repository.host(name) for name in ("small", "large", "large_1")] == ["", "a", "b"]


def test_a_deployment_on_one_host_says_nothing_of_hosts(tmp_path: Path) -> None:
    repository = built(tmp_path, tls=None)
    for path in repository.root.rglob("*"):
        assert not path.is_file() or not any(word in path.read_text() for word in ("tls", "host", "listen")), path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "a b"}, "models.large.host: 'a b' is no host, host:port or"),
        ({"host": "a:99999"}, "models.large.host: 'a:99999' has port 99999; ports lie in 1..65535"),
        ({"host": "a", "listen": "x:y"}, "models.large.listen: 'x:y' is no host"),
        ({"listen": "0.0.0.0"}, "models.large.listen is '0.0.0.0' without a host"),
        ({"host": ["a", "b"]}, "models.large.host names 2 hosts for 1 replicas; give a list, one for each"),
        ({"host": ["a", "a"], "replicas": 2}, "models.large_1.host is a:8004, which is that of large"),
        ({"host": "a", "tls": None}, "tls.peers is empty, so no model would let the entry model in"),
        ({"tls": PEERS}, "tls is given, but no models.*.host"),
        ({"host": "a", "tls": {"mode": "none"}}, "Invalid enum value 'none' - at `$.tls.mode`"),
        ({"host": "a", "tls": {**PEERS, "user_timeout_seconds": 0}}, "at `$.tls.user_timeout_seconds`"),
        ({"host": "a", "tls": {"certificate": "x"}}, "unknown field `certificate` - at `$.tls`"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    result = run(build, "--config", deployment(tmp_path, **options), "--output", tmp_path / "repository")
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "repository").exists()


def test_a_mesh_needs_no_names(tmp_path: Path) -> None:
    assert built(tmp_path, host="large.models.svc", tls={"mode": "mesh"}).entry().tls == TlsSettings("mesh")


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("tokenrouter", '"{\\"large\\":\\"gpu-b:8004\\"}"', '"{\\"other\\":\\"gpu-b:8004\\"}"', "hosts has 'other'"),
        ("tokenrouter", "gpu-b:8004", "gpu b", "parameter hosts is"),
        ("large", "gpu-b:8004", "gpu-b:0", "parameter host is 'gpu-b:0'; it is a host or host:port"),
        ("large", "mtls", "tls", "parameter tls is"),
    ],
)
def test_a_repository_that_was_changed_by_hand(tmp_path: Path, name: str, old: str, new: str, words: str) -> None:
    repository = built(tmp_path, host="gpu-b")
    path = repository.root / name / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        repository.entry() if name == "tokenrouter" else repository.model(name)


def test_the_digest_is_of_what_decides_tokens(tmp_path: Path) -> None:
    spec = emulated_spec(options={"step_ms": 1.0})
    repository = Repository(write_emulated(tmp_path / "a", spec))
    digest = repository.digest()
    copy = Repository(shutil.copytree(repository.root, tmp_path / "b"))
    assert copy.digest() == digest
    config = copy.root / "small" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace('string_value: "0.25"', 'string_value: "0.5"'))
    assert config.read_text() != text
    assert copy.digest() == digest, "limits may differ"
    for edit in (
        lambda: (copy.root / "large" / "1" / "config.json").write_text("{}"),
        lambda: (copy.root / "small" / "1" / "tokenizer.json").unlink(),
        lambda: write_emulated(copy.root, emulated_spec(entry={"policy": "single", "policy_params": {}})),
    ):
        edit()
        assert copy.digest() != digest
        write_emulated(copy.root, spec)
        assert copy.digest() == digest


def test_only_models_of_one_host_share_its_cores(tmp_path: Path) -> None:
    repository = built(tmp_path, host="gpu-b")
    assert repository.engines() == ["emulated", "emulated"]
    assert repository.engines("gpu-b") == repository.engines("") == ["emulated"]


def test_models_to_load_are_named_one_by_one_or_together() -> None:
    known = ["large", "small", "tokenrouter"]
    assert with_names(["tokenrouter"], ["large", "--x=1"], known) == (["tokenrouter", "large"], ["--x=1"])
    assert with_names(["tokenrouter,large", "small"], [], known) == (["tokenrouter", "large", "small"], [])
    assert with_names([], ["large"], known) == ([], ["large"])
    with pytest.raises(ConfigError, match="--load lagre: there is no such model; there are large, small, tokenrouter"):
        with_names(["lagre"], [], known)


def test_who_needs_whom_of_another_host(tmp_path: Path) -> None:
    repository = built(tmp_path, host="gpu-b", entry={"unary": "unary"})
    assert needed(repository, []) == {"tokenrouter": ["large"], "unary": ["large"]}
    assert needed(repository, ["tokenrouter", "small"]) == {"tokenrouter": ["large"]}
    assert needed(repository, ["large"]) == {}
    assert load_spec(tmp_path / "deployment.yaml").models["large"].host == "gpu-b"


def test_replicas_of_the_models_that_entry_models_of_this_host_route_to(tmp_path: Path) -> None:
    repository = built(tmp_path, replicas=2, host=["", "gpu-b"], gpus=[], entry={"unary": "unary"})
    assert needed(repository, ["tokenrouter"]) == {"tokenrouter": ["large_1"]}
    assert replicas(repository, []) == [("large", "large_1"), ("small",)]
    assert replicas(repository, ["large_1"]) == []


def test_a_start_waits_for_one_replica_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = {"large_1": True, "large_2": False, "tiny": False}
    monkeypatch.setattr("tools.launch.remote.states", lambda *_: connected)

    def missing(*groups: tuple[str, ...]) -> list[str]:
        return wait("", {"tokenrouter": list(connected)}, groups, 0.0, lambda: False)

    assert missing(("small",), ("large_1", "large_2")) == []
    assert missing(("small", "large_2")) == []  # small is on this host
    assert missing(("large_1", "large_2"), ("tiny", "large_2")) == ["tiny", "large_2"]
