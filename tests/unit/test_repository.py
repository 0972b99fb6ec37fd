from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.repositories import emulated_spec
from tokenrouter.errors import ConfigError
from tokenrouter.repository import Repository
from tools.build_repository.build import BUILT, repository_files, write_repository
from tools.build_repository.spec import load_spec

ROOT = Path(__file__).parents[2]


def test_the_committed_repository_is_what_the_demo_configuration_gives() -> None:
    files = repository_files(load_spec(ROOT / "configs" / "demo.yaml"))
    for relative, text in files.items():
        assert (ROOT / "model_repository" / relative).read_text("utf-8") == text, f"{relative}: build it again"
    committed = {
        str(path.relative_to(ROOT / "model_repository"))
        for path in (ROOT / "model_repository").rglob("*")
        if path.name in (BUILT, "config.pbtxt", "model.yaml", ".gitkeep")
    }
    assert committed == set(files)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_committed_deployment_builds(path: Path, tmp_path: Path) -> None:
    spec = load_spec(path)
    write_repository(spec, tmp_path)
    repository = Repository(tmp_path)
    assert tuple(repository.models(repository.entry())) == tuple(spec.models)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    spec = emulated_spec(
        entry={
            "policy": "random",
            "policy_params": {"p": 0.25},
            "max_inflight": 7,
            "selectable_policies": ["single"],
            "queue": {"max_queue_size": 3, "default_timeout_microseconds": 5, "timeout_action": "DELAY"},
        },
        model={
            "batching": {"threshold": 3, "max_queue_delay_microseconds": 9, "batch_thresholds": {1: 1, 4: 2}},
            "direct_kv_share": 0.5,
        },
        options={"max_batch_size": 12},
    )
    write_repository(spec, tmp_path)
    repository = Repository(tmp_path)
    entry = repository.entry("tokenrouter")
    assert (entry.policy.name, entry.policy.params) == ("random", '{"p": 0.25}')
    assert (entry.max_inflight, entry.selectable) == (7, {"single"})
    assert (entry.queue.max_queue_size, entry.queue.default_timeout_ns, entry.queue.reject) == (3, 5000, False)
    assert entry.queue.allow_timeout_override
    small = repository.model("small")
    assert (small.batching.threshold, small.batching.max_queue_delay_ns) == (3, 9000)
    assert small.batching.by_in_flight == {1: 1, 4: 2}
    assert (small.direct_kv_share, small.engine_options) == (0.5, {"max_batch_size": 12})


def test_equal_specifications_give_equal_bytes() -> None:
    assert repository_files(emulated_spec()) == repository_files(emulated_spec())


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        pytest.param(
            "entry: {policy: single, polcy: x}\nmodels: {}", r"unknown field `polcy` - at `\$.entry`", id="entry"
        ),
        pytest.param("entry: {policy: single}\nmodels: {s: {engin: x}}", "unknown field `engin`", id="model"),
        pytest.param("entry: {policy: single}\nmodels: {s: {batching: {b: 1}}}", "unknown field `b`", id="batching"),
        pytest.param("entry: {policy: single}\nmodels: {}\nmodel: {}", "unknown field `model`", id="top"),
        pytest.param("entry: {}\nmodels: {}", "missing required field `policy`", id="missing"),
        pytest.param("entry: {policy: single, max_inflight: x}\nmodels: {}", r"\$.entry.max_inflight", id="type"),
    ],
)
def test_a_key_that_is_not_known_is_named_with_the_file(tmp_path: Path, yaml: str, says: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml)
    with pytest.raises(ConfigError, match=f"{path}: .*{says}"):
        load_spec(path)


@pytest.mark.parametrize(
    ("entry", "models", "says"),
    [
        pytest.param({}, (), "models is empty", id="no-models"),
        pytest.param({"policy_params": {}}, ("ensemble",), "names must differ", id="the-ensemble's-name"),
        pytest.param({"policy_params": {}}, ("tokenrouter",), "names must differ", id="the-entry's-name"),
    ],
)
def test_names_that_collide_are_refused(entry: dict[str, Any], models: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        repository_files(emulated_spec(entry=entry, models=models))
