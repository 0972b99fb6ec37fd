"""What a model repository says of itself, and that it says what the builder was told."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from tests.support.repositories import emulated_spec
from tokenrouter.config.entry import EntryConfig
from tokenrouter.config.subserver import SubserverConfig
from tokenrouter.errors import ConfigError
from tokenrouter.repository import Repository
from tools.build_repository.build import write_repository
from tools.build_repository.spec import DeploymentSpec


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


def test_the_newest_version_counts(tmp_path: Path) -> None:
    for name in ("1", "2", "10", "new", "3.bak"):
        (tmp_path / "small" / name).mkdir(parents=True)
    assert Repository(tmp_path).version("small") == tmp_path / "small" / "10"


def test_a_model_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"small has no version folder"):
        Repository(tmp_path).version("small")


@pytest.mark.parametrize(
    ("model", "folder"), [("", "small/1"), ("model: weights", "small/1/weights"), ("model: ../../shared", "shared")]
)
def test_a_checkpoint_lies_in_the_version_folder_unless_named(tmp_path: Path, model: str, folder: str) -> None:
    (tmp_path / "small" / "1").mkdir(parents=True)
    (tmp_path / "small" / "1" / "model.yaml").write_text(f"engine: emulated\n{model}\n")
    assert Repository(tmp_path).checkpoint("small") == (tmp_path / folder).resolve()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(None, "cannot be read", id="missing"),
        pytest.param("name: ", "not a valid model configuration", id="broken"),
        pytest.param('nme: "x"', "not a valid model configuration", id="unknown-field"),
    ],
)
def test_a_bad_config_pbtxt_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError, match=f"{tmp_path}/small/config.pbtxt .*{says}"):
        Repository(tmp_path).config("small")


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    write_repository(emulated_spec(), tmp_path)
    return tmp_path


def test_the_only_entry_model_needs_no_name(emulated: Path) -> None:
    (emulated / "other").mkdir()  # somebody else's models may stand beside ours
    (emulated / "other" / "config.pbtxt").write_text('backend: "python"')
    repository = Repository(emulated)
    assert (repository.entry().name, repository.entry().models) == ("tokenrouter", ("small", "large"))
    assert repository.entry("tokenrouter") == repository.entry()
    assert list(repository.models(repository.entry())) == ["small", "large"]
    assert repository.names() == ["ensemble", "large", "other", "small", "tensorrt_llm_bls", "tokenrouter"]


@pytest.mark.parametrize("name", ["nothing", "small", "ensemble"])
def test_a_wrong_entry_model_is_refused_with_those_there_are(emulated: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"no entry model '{name}'; there is tokenrouter"):
        Repository(emulated).entry(name)


def test_none_or_several_entry_models_are_refused(emulated: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shutil.copytree(emulated / "tokenrouter", emulated / "second")
    path = emulated / "second" / "config.pbtxt"
    path.write_text(path.read_text().replace('name: "tokenrouter"', 'name: "second"'))
    repository = Repository(emulated)
    with pytest.raises(ConfigError, match="entry models: second, tokenrouter; name one with --entry"):
        repository.entry()
    assert [entry.name for entry in repository.entries_to("large")] == ["second", "tokenrouter"]
    assert repository.entries_to("tokenrouter") == []
    with pytest.raises(ConfigError, match="entry models: none; name one with --entry"):
        Repository(tmp_path_factory.mktemp("empty")).entry()


def test_an_entry_model_that_routes_to_a_model_that_is_not_there_is_refused(emulated: Path) -> None:
    shutil.rmtree(emulated / "large")
    repository = Repository(emulated)
    with pytest.raises(ConfigError, match="tokenrouter routes to 'large', which is not in the repository"):
        repository.models(repository.entry())


def test_what_triton_says_counts_more_than_the_files(emulated: Path) -> None:
    shutil.copytree(emulated / "small" / "1", emulated / "small" / "2")
    config = {**Repository(emulated).config("small"), "dynamic_batching": {"preferred_batch_size": [4]}}
    repository = Repository(emulated, configs={"small": config}, versions={"small": "1"})
    assert repository.model("small").batching.threshold == 4
    assert repository.version("small") == emulated / "small" / "1"
    assert repository.version("large") == emulated / "large" / "1"


def test_engines_are_counted_and_a_broken_model_is_passed_over(emulated: Path) -> None:
    assert Repository(emulated).engines() == ["emulated", "emulated"]
    (emulated / "large" / "1" / "model.yaml").write_text("engine: vllm")
    assert Repository(emulated).engines() == ["emulated"]
    (emulated / "tokenrouter" / "config.pbtxt").write_text("nme: 3")
    assert Repository(emulated).entries_to("small") == []


def test_a_deployment_that_says_nothing_has_the_defaults_of_the_configuration(tmp_path: Path) -> None:
    write_repository(msgspec.convert({"entry": {"policy": "single"}, "models": {"m": {}}}, DeploymentSpec), tmp_path)
    repository = Repository(tmp_path)
    assert repository.entry() == EntryConfig("tokenrouter", ("m",))
    assert repository.model("m") == SubserverConfig("m", "torch", tmp_path / "m" / "1", {})


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone: no such folder; name a model repository"):
        Repository(tmp_path / "gone")
