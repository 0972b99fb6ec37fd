from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenrouter.batcher import Batching
from tokenrouter.config.entry import entry_config
from tokenrouter.config.roles import refuse_instances, role_of
from tokenrouter.config.subserver import subserver_config
from tokenrouter.engines import load_engine
from tokenrouter.entry_queue import EntryQueuePolicy, Priorities
from tokenrouter.errors import ConfigError
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import BUILTIN
from tokenrouter.request import Defaults


def model_config(batching: dict[str, Any] | None = None, **parameters: str) -> dict[str, Any]:
    """The dict that Triton hands over: numbers of 64 bits come as text."""
    return {
        "name": "m",
        "dynamic_batching": batching or {},
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


def entry(batching: dict[str, Any] | None = None, **parameters: str) -> Any:
    return entry_config(model_config(batching, **{"models": "small,large", **parameters}))


def subserver(folder: Path, batching: dict[str, Any] | None = None, yaml: str = "{}", **parameters: str) -> Any:
    (folder / "model.yaml").write_text(yaml)
    return subserver_config(model_config(batching, **parameters), folder)


# --- the entry model --------------------------------------------------------------------------------------------------


def test_an_entry_model_has_defaults_for_everything_but_its_models() -> None:
    config = entry()
    assert config.models == ("small", "large")
    assert config.policy == PolicySpec("single", "{}")
    assert config.selectable == frozenset(BUILTIN)
    assert (config.max_inflight, config.connect_timeout_ns, config.end_ids) == (64, 30 * 10**9, None)
    assert config.queue == EntryQueuePolicy(allow_timeout_override=True)


def test_every_setting_of_an_entry_model_is_read() -> None:
    config = entry(
        max_queue_size="7",
        default_timeout_microseconds="500000",
        timeout_action="DELAY",
        allow_timeout_override="false",
        role="orchestrator",
        models=" a , b,c",
        policy="random",
        policy_params='{"p": 0.5}',
        selectable_policies="single, random",
        max_inflight="3",
        connect_timeout_ms="250",
        defaults='{"max_tokens": 256, "exclude_input_in_output": true}',
        end_ids="1, 2",
        allow_added_tokens="true",
        allow_special_tokens="true",
        priority_levels="3",
        default_priority_level="2",
        priority_queue_policy='{"1": {"max_queue_size": 4, "timeout_action": "DELAY"}}',
        max_request_seconds="90",
        policy_checkpoints='["routers/a.pt"]',
        policy_cache_mib="5",
    )
    level_1 = EntryQueuePolicy(4, 0, reject=False, allow_timeout_override=False)
    assert config.priorities == Priorities(3, 2, {1: level_1})
    assert (config.max_request_ns, config.policy_cache_bytes) == (90 * 10**9, 5 << 20)
    assert config.policy_checkpoints == ("routers/a.pt",)
    assert config.models == ("a", "b", "c")
    assert config.policy == PolicySpec("random", '{"p": 0.5}')
    assert config.selectable == {"single", "random"}
    assert (config.max_inflight, config.connect_timeout_ns, config.end_ids) == (3, 250_000_000, (1, 2))
    assert (config.allow_added_tokens, config.allow_special_tokens) == (True, True)
    assert config.defaults == Defaults(256, add_special_tokens=True, exclude_input_in_output=True)
    assert config.queue == EntryQueuePolicy(7, 500_000_000, reject=False, allow_timeout_override=False)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        pytest.param(
            {"priority_levels": "2"}, "default_priority_level is 0; it lies in 1..priority_levels", id="level"
        ),
        pytest.param(
            {"priority_levels": "2", "default_priority_level": "1", "priority_queue_policy": '{"3": {}}'},
            "priority_queue_policy has level 3; priority_levels is 2",
            id="unknown-level",
        ),
        pytest.param({"priority_queue_policy": '{"1": {"size": 3}}'}, "parameter priority_queue_policy is", id="field"),
        pytest.param({"max_request_seconds": "-1"}, "parameter max_request_seconds is '-1'", id="seconds"),
        pytest.param({"policy_checkpoints": '["../a.pt"]'}, "parameter policy_checkpoints is", id="outside"),
        pytest.param({"policy_cache_mib": "0"}, "parameter policy_cache_mib is '0'", id="no-cache"),
        pytest.param({"models": ""}, "parameter models must name each model once", id="no-models"),
        pytest.param({"models": "a,a"}, "parameter models must name each model once", id="a-model-twice"),
        pytest.param({"policy_params": "{"}, "parameter policy_params is '{'; it is a JSON object", id="no-json"),
        pytest.param({"policy_params": "[]"}, "parameter policy_params is '\\[\\]'", id="no-object"),
        pytest.param({"max_inflight": "0"}, "parameter max_inflight is '0'; .* at least 1", id="zero"),
        pytest.param({"max_inflight": "many"}, "parameter max_inflight is 'many'", id="no-number"),
        pytest.param({"connect_timeout_ms": "-1"}, "parameter connect_timeout_ms is '-1'", id="negative"),
        pytest.param({"defaults": '{"max_tokens": 0}'}, "parameter defaults is .*; it is a JSON object", id="default"),
        pytest.param({"defaults": '{"top_k": 5}'}, "parameter defaults is .*; it is a JSON object", id="no-default"),
        pytest.param({"end_ids": "eos"}, "parameter end_ids is 'eos'", id="no-ids"),
        pytest.param({"end_ids": "5,-1"}, "parameter end_ids is '5,-1'", id="negative-id"),
        pytest.param({"allow_special_tokens": "true"}, "allow_special_tokens needs end_ids", id="special-tokens"),
        pytest.param({"max_inflght": "3"}, "unknown parameter 'max_inflght'.*known: .*max_inflight", id="unknown"),
    ],
)
def test_a_bad_parameter_of_an_entry_model_is_refused_by_name(parameters: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"model 'm': {says}"):
        entry(**parameters)


@pytest.mark.parametrize("role", ["", "master"])
def test_a_model_without_a_known_role_is_refused(role: str) -> None:
    with pytest.raises(ConfigError, match=f"'m': parameter role is '{role}'; it is one of orchestrator, "):
        role_of(model_config(role=role) if role else {"name": "m"})
    assert role_of(model_config(role="subserver")) == "subserver"


@pytest.mark.parametrize(
    ("groups", "instances"),
    [
        ([], 1),
        ([{"count": 1, "kind": "KIND_CPU", "gpus": []}], 1),
        ([{"count": 1, "kind": "KIND_GPU", "gpus": [1]}], 1),
        ([{"count": 2, "kind": "KIND_CPU"}], 2),
        ([{"count": 1, "kind": "KIND_GPU", "gpus": [0, 1]}], 2),
        ([{"kind": "KIND_CPU"}, {"kind": "KIND_CPU"}], 2),
    ],
)
def test_more_than_one_instance_is_refused(groups: list[dict[str, Any]], instances: int) -> None:
    if instances == 1:
        refuse_instances({"name": "small", "instance_group": groups})
        return
    with pytest.raises(
        ConfigError, match=r"'small': instance_group in config\.pbtxt makes 2 instances; .* Leave one of"
    ):
        refuse_instances({"name": "small", "instance_group": groups})


# --- subservers -------------------------------------------------------------------------------------------------------


def test_a_subserver_has_defaults_for_everything(tmp_path: Path) -> None:
    config = subserver(tmp_path)
    assert (config.engine, config.checkpoint, config.engine_options) == ("torch", tmp_path.resolve(), {})
    assert config.batching == Batching(1, 0, {})
    assert (config.direct_kv_share, config.max_inflight, config.queue) == (
        0.25,
        64,
        EntryQueuePolicy(allow_timeout_override=True),
    )


def test_every_setting_of_a_subserver_is_read(tmp_path: Path) -> None:
    config = subserver(
        tmp_path,
        {"preferred_batch_size": [8, 4], "max_queue_delay_microseconds": "1500"},
        "engine: emulated\nmodel: weights\nstep_ms: 3\nload_after: [large]\n",
        role="subserver",
        batch_thresholds='{"1": 1, "8": 4}',
        direct_kv_share="0",
        max_inflight="2",
    )
    assert (config.engine, config.checkpoint) == ("emulated", (tmp_path / "weights").resolve())
    assert config.engine_options == {"step_ms": 3}
    assert config.batching == Batching(4, 1_500_000, {1: 1, 8: 4})
    assert (config.direct_kv_share, config.max_inflight, config.load_after) == (0.0, 2, ("large",))


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        pytest.param({"batch_thresholds": "{"}, "batch_thresholds is '{'", id="no-json"),
        pytest.param({"batch_thresholds": "[1, 2]"}, "batch_thresholds is '.1, 2.'", id="a-list"),
        pytest.param({"batch_thresholds": "3"}, "batch_thresholds is '3'", id="a-number"),
        pytest.param({"batch_thresholds": '{"a": 1}'}, "batch_thresholds is", id="no-number"),
        pytest.param({"batch_thresholds": '{"4": 2.7}'}, "batch_thresholds is", id="a-fraction"),
        pytest.param({"batch_thresholds": '{"4": null}'}, "batch_thresholds is", id="null"),
        pytest.param({"batch_thresholds": '{"4": 5}'}, "batch_thresholds has 4: 5", id="out-of-range"),
        pytest.param({"direct_kv_share": "1"}, "direct_kv_share is '1'; it is a number in .0, 1.", id="share-one"),
        pytest.param({"direct_kv_share": "nan"}, "direct_kv_share is 'nan'", id="share-nan"),
        pytest.param({"direct_kv_share": "-0.1"}, "direct_kv_share is '-0.1'", id="share-negative"),
        pytest.param({"treshold": "1"}, "unknown parameter 'treshold'", id="unknown"),
    ],
)
def test_a_bad_parameter_of_a_subserver_is_refused_by_name(
    tmp_path: Path, parameters: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"'m'.*{says}"):
        subserver(tmp_path, **parameters)


@pytest.mark.parametrize(
    ("batching", "says"),
    [
        pytest.param({"preferred_batch_size": [0]}, "preferred_batch_size is 0", id="threshold-zero"),
        pytest.param({"max_queue_delay_microseconds": "-1"}, "max_queue_delay_microseconds", id="negative-delay"),
    ],
)
def test_bad_batching_names_the_model_and_the_field(tmp_path: Path, batching: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"'m'.*{says}"):
        subserver(tmp_path, batching)


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        pytest.param(
            "engine: vllm", "model.yaml: engine is 'vllm'; known: emulated, tensorrt_llm, torch", id="unknown-engine"
        ),
        pytest.param("load_after: large", "model.yaml: load_after is 'large'; it is a list", id="load-after"),
        pytest.param("- a", "model.yaml must hold a mapping", id="a-list"),
        pytest.param("", "model.yaml must hold a mapping", id="empty"),
        pytest.param("a: [", "model.yaml is not valid YAML", id="no-yaml"),
        pytest.param("a: \udcff", "model.yaml is not valid YAML", id="no-utf8"),
    ],
)
def test_a_bad_model_yaml_is_refused_by_its_path(tmp_path: Path, yaml: str, says: str) -> None:
    (tmp_path / "model.yaml").write_bytes(yaml.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=f"{tmp_path}.*{says}"):
        subserver_config(model_config(), tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({"stepms": 3}, "unknown field `stepms`", id="unknown"),
        pytest.param(
            {"kv_cache_config": {"blocks": 3}}, r"unknown field `blocks` - at `\$.kv_cache_config`", id="nested"
        ),
        pytest.param({"max_batch_size": "big"}, r"Expected `int`, got `str` - at `\$.max_batch_size`", id="type"),
        pytest.param({"max_batch_size": 0}, "max_batch_size", id="no-batch"),
        pytest.param({"max_seq_len": -5}, "max_seq_len", id="negative-context"),
        pytest.param({"kv_cache_config": {"tokens_per_block": 0}}, "tokens_per_block", id="empty-blocks"),
        pytest.param({"kv_cache_config": {"max_tokens": 0}}, "max_tokens", id="empty-pool"),
        pytest.param({"step_ms": -1}, "step_ms", id="negative-time"),
        pytest.param({"step_ms": {}}, "step_ms", id="empty-table"),
    ],
)
def test_bad_options_of_the_emulated_engine_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 10}))
    with pytest.raises(ConfigError, match=f"model.yaml: .*{says}"):
        load_engine("emulated", tmp_path, options)


def test_an_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vllm'; known: torch, tensorrt_llm, emulated"):
        load_engine("vllm", tmp_path, {})


@pytest.mark.parametrize(
    "batching",
    [
        pytest.param({"default_queue_policy": {"max_queue_size": 9}}, id="queue policy"),
        pytest.param({"priority_levels": 2}, id="priorities"),
    ],
)
def test_tritons_own_queue_is_refused_with_the_parameters_to_use(batching: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"has a queue policy or priorities.*set max_queue_size"):
        entry(batching)
