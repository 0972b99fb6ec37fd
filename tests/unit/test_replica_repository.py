"""Replicas from the deployment's YAML file to the offline engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.deployments import at, deployment, run
from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter.assembly import Entry, build_subserver, direct_entry
from tokenrouter.config.entry import entry_config
from tokenrouter.errors import ConfigError
from tokenrouter.offline import TokenRouter
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tools.build_repository.build import built_deployment
from tools.build_repository.spec import BatchingSpec
from tools.build_repository.tuning import plan_edits, write_edits

TWO = {"large": {"replicas": 2}}


def repository(folder: Path, **options: object) -> Repository:
    write_emulated(folder, emulated_spec(**{"per_model": TWO, **options}))  # type: ignore[arg-type]
    return Repository(folder)


def test_every_replica_is_a_model_of_the_repository(tmp_path: Path) -> None:
    built = repository(tmp_path)
    assert {"small", "large", "large_1"} <= set(built.names())
    entry = built.entry()
    assert entry.models == ("small", "large")
    assert entry.all_replicas == {"small": ("small",), "large": ("large", "large_1")}
    models = built.models(entry)
    assert {name: model.model for name, model in models.items()} == {
        "small": "small",
        "large": "large",
        "large_1": "large",
    }
    assert models["large_1"].checkpoint == models["large"].checkpoint == tmp_path / "large" / "1"
    assert [each.name for each in built.entries_to("large_1")] == ["tokenrouter"]
    assert built_deployment(tmp_path).models["large"].replicas == 2


def test_a_repository_without_replicas_says_nothing_of_them(tmp_path: Path) -> None:
    repository(tmp_path, per_model={})
    for name in ("tokenrouter", "small", "large"):
        assert "replica" not in (tmp_path / name / "config.pbtxt").read_text()


def test_tokens_of_the_offline_engine_do_not_depend_on_replicas(tmp_path: Path) -> None:
    fields = [
        RequestFields(
            text_input=f"request {seed}",
            max_tokens=20,
            seed=seed,
            temperature=3.0,
            policy="random",
            policy_params={"p": 0.5},
        )
        for seed in range(6)
    ]
    found = []
    for count in (1, 3):
        options = {"margin": 2.0}
        per_model = {name: {"replicas": count} for name in ("small", "large")}
        folder = tmp_path / str(count)
        repository(folder, per_model=per_model, options=options)
        with TokenRouter.from_repository(folder) as router:
            assert router.models == ("small", "large")
            assert len(router.statistics) == 2 * count
            found.append([(result.tokens, result.tokens_by_model) for result in router.generate(fields)])
            assert all(numbers.visits > 0 for numbers in router.statistics.values())
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens, _ in found[0]}) > 1


def test_routed_kv_is_divided_among_the_entry_models_that_share_it(tmp_path: Path) -> None:
    options = {"kv_cache_config": {"max_tokens": 1600, "tokens_per_block": 16}}
    built = repository(tmp_path, entry={"routed_orchestrators": 3}, options=options, per_model={})
    config = built.model("small")
    assert config.routed_orchestrators == 3
    subserver = build_subserver(config, built)
    entry = Entry(built.entry(), built)
    blocks = []
    for peer in (1, 2, 3):
        subserver.handle(peer, entry.hello("tokenrouter", "routed"), now_ns=0)
        ((_, info),) = subserver.outbox
        subserver.outbox.clear()
        blocks.append(info.kv_blocks)  # type: ignore[union-attr]
    # 100 blocks, of which a quarter is for direct calls.
    assert blocks == [25, 25, 25]
    subserver.handle(4, direct_entry(config, built).hello("small", "direct"), now_ns=0)
    assert subserver.outbox[0][1].kv_blocks == 25  # type: ignore[union-attr]


def test_gpus_are_dealt_out_and_all_replicas_have_the_kv_of_the_one_with_the_least_room(tmp_path: Path) -> None:
    path = deployment(tmp_path, at("models.large.replicas", 2), at("models.large.gpus", [0, 1]))
    result = run("--config", path, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    files = {
        name: yaml.safe_load((tmp_path / "out" / name / "1/model.yaml").read_text()) for name in ("large", "large_1")
    }
    assert [files[name]["gpus"] for name in files] == [[0], [1]]
    assert [files[name]["tensor_parallel_size"] for name in files] == [1, 1]
    tokens = {name: file["kv_cache_config"]["max_tokens"] for name, file in files.items()}
    alone = deployment(tmp_path / "alone", at("models.large.gpus", [0]))
    assert run("--config", alone, "--output", tmp_path / "shared").exit_code == 0
    with_small = yaml.safe_load((tmp_path / "shared/large/1/model.yaml").read_text())["kv_cache_config"]["max_tokens"]
    assert tokens == {"large": with_small, "large_1": with_small}
    small = yaml.safe_load((tmp_path / "out/small/1/model.yaml").read_text())
    assert small["load_after"] == ["large"]


@pytest.mark.parametrize(
    ("edits", "problem"),
    [
        ((at("models.large.replicas", 0),), "Expected `int` >= 1 - at `$.models[...].replicas`"),
        (
            (at("models.large.replicas", 2), at("models.large.gpus", [0, 1, 2])),
            "models.large.replicas is 2, but gpus names 3",
        ),
        (
            (at("models.large.replicas", 2), at("entry.name", "large_1")),
            "model names must differ: large_1, ensemble, tensorrt_llm_bls, small, large, large_1",
        ),
        ((at("entry.routed_orchestrators", 0),), "Expected `int` >= 1 - at `$.entry.routed_orchestrators`"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, edits: tuple[object, ...], problem: str) -> None:
    result = run("--config", deployment(tmp_path, *edits), "--output", tmp_path / "out")  # type: ignore[arg-type]
    assert result.exit_code == 2
    assert problem in " ".join(result.output.split())


def _config(**parameters: object) -> dict[str, object]:
    given = {name: {"string_value": str(value)} for name, value in parameters.items()}
    return {"name": "entry", "parameters": {"role": {"string_value": "orchestrator"}, **given}}


@pytest.mark.parametrize(
    "given", [{"huge": ["huge"]}, {"large": []}, {"large": ["large", "large"]}, {"large": ["small"]}]
)
def test_the_entry_model_refuses_replicas_that_are_none(given: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match="it names the replicas of each of small, large that has several, each once"):
        entry_config(_config(models="small,large", replicas=json.dumps(given)))


def test_a_model_that_does_not_know_whose_replica_it_is_is_named(tmp_path: Path) -> None:
    built = repository(tmp_path)
    config = tmp_path / "large_1" / "config.pbtxt"
    config.write_text(config.read_text().replace('"large" } }', '"small" } }'))
    with pytest.raises(ConfigError, match=r"large_1/config.pbtxt: tokenrouter takes it for a replica of 'large'"):
        built.models(built.entry())


def test_tuned_thresholds_are_written_for_every_replica(tmp_path: Path) -> None:
    repository(tmp_path)
    edits = plan_edits(tmp_path, {"large": BatchingSpec(threshold=4, max_queue_delay_microseconds=100)})
    write_edits(edits.values())
    built = Repository(tmp_path)
    assert [built.model(name).batching.threshold for name in ("small", "large", "large_1")] == [1, 4, 4]
