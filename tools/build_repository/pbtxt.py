"""The text files of a repository. Deterministic: equal specifications give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from tokenrouter.config import MAX_BATCH_SIZE, MAX_REQUEST_SECONDS
from tokenrouter.policies.cache import MAX_BYTES
from tokenrouter.repository import BACKEND
from tokenrouter.request import Defaults, Limits
from tokenrouter.triton.tensors import (
    ENTRY_INPUTS,
    ENTRY_OUTPUTS,
    SUBSERVER_INPUTS,
    SUBSERVER_OUTPUTS,
    Input,
)
from tokenrouter.yaml_files import Dumper
from tools.build_repository.routers import placed, policy_params, router_paths
from tools.build_repository.spec import BatchingSpec, DeploymentSpec, EntrySpec, ModelSpec, QueueSpec

_GENERATED = "# Written by python -m tools.build_repository; change the deployment's YAML file and run it again."
_BUILT = """\
# The deployment as it was built, everything filled in. Written by python -m tools.build_repository; tools.dtmc apply
# and tools.tune change its thresholds and write the files that follow from it again."""


def entry_pbtxt(entry: EntrySpec, models: Iterable[str]) -> str:
    """config.pbtxt of the entry model."""
    parameters = {
        "role": "orchestrator",
        "models": ",".join(models),
        "policy": entry.policy,
        "policy_params": json.dumps(policy_params(entry)),
        "max_inflight": str(entry.max_inflight),
        "connect_timeout_ms": str(entry.connect_timeout_ms),
        "max_queue_size": str(entry.queue.max_queue_size),
        "default_timeout_microseconds": str(entry.queue.default_timeout_microseconds),
        "timeout_action": entry.queue.timeout_action,
        "allow_timeout_override": str(entry.queue.allow_timeout_override).lower(),
    }
    parameters.update(_priorities(entry.queue))
    if entry.max_request_seconds != MAX_REQUEST_SECONDS:
        parameters["max_request_seconds"] = str(entry.max_request_seconds)
    if nameable := list(dict.fromkeys([*entry.policy_checkpoints, *router_paths(entry)])):
        parameters["policy_checkpoints"] = json.dumps(nameable)
    if entry.policy_cache_mib != MAX_BYTES >> 20:
        parameters["policy_cache_mib"] = str(entry.policy_cache_mib)
    if entry.limits != Limits():
        parameters["limits"] = msgspec.json.encode(entry.limits).decode()
    if entry.defaults != Defaults():
        parameters["defaults"] = msgspec.json.encode(entry.defaults).decode()
    if entry.selectable_policies is not None:
        parameters["selectable_policies"] = ",".join(entry.selectable_policies)
    if entry.end_ids is not None:
        parameters["end_ids"] = ",".join(str(token) for token in entry.end_ids)
    for name in ("allow_added_tokens", "allow_special_tokens"):
        if getattr(entry, name):
            parameters[name] = "true"
    return _join(
        _head(entry.name, entry.max_batch_size),
        _inputs(ENTRY_INPUTS),
        _outputs(ENTRY_OUTPUTS),
        _INSTANCE,
        _parameters(parameters),
    )


def subserver_pbtxt(name: str, model: ModelSpec) -> str:
    """config.pbtxt of a subserver."""
    max_batch_size = max(int(model.options.get("max_batch_size", MAX_BATCH_SIZE)), model.batching.threshold)
    parameters = {"role": "subserver", "direct_kv_share": f"{model.direct_kv_share:g}"}
    if model.batching.batch_thresholds:
        table = {str(n): threshold for n, threshold in sorted(model.batching.batch_thresholds.items())}
        parameters["batch_thresholds"] = json.dumps(table)
    parameters["max_inflight"] = str(model.max_inflight)
    if model.max_request_seconds != MAX_REQUEST_SECONDS:
        parameters["max_request_seconds"] = str(model.max_request_seconds)
    if model.policy_cache_mib != MAX_BYTES >> 20:
        parameters["policy_cache_mib"] = str(model.policy_cache_mib)
    return _join(
        _head(name, max_batch_size),
        _inputs(SUBSERVER_INPUTS),
        _outputs(SUBSERVER_OUTPUTS),
        _INSTANCE,
        _batching(model.batching),
        _parameters(parameters),
    )


def _priorities(queue: QueueSpec) -> dict[str, str]:
    """Parameters of the queue's priorities, if it has any."""
    if not queue.priority_levels:
        return {}
    return {
        "priority_levels": str(queue.priority_levels),
        "default_priority_level": str(queue.default_priority_level),
        "priority_queue_policy": msgspec.json.encode(queue.priority_queue_policy, order="sorted").decode(),
    }


def ensemble_pbtxt(entry: EntrySpec) -> str:
    """config.pbtxt of the ensemble that maps 1:1 onto the entry model."""
    assert entry.ensemble is not None
    inputs = "".join(_mapping("input_map", name) for name in ENTRY_INPUTS)
    outputs = "".join(_mapping("output_map", name) for name in ENTRY_OUTPUTS)
    step = f'    {{\n      model_name: "{entry.name}"\n      model_version: -1\n{inputs}{outputs}    }}\n'
    head = f'{_GENERATED}\nname: "{entry.ensemble}"\nplatform: "ensemble"\nmax_batch_size: {entry.max_batch_size}'
    return _join(
        f"{head}\n{_DECOUPLED}",
        _inputs(ENTRY_INPUTS),
        _outputs(ENTRY_OUTPUTS),
        f"ensemble_scheduling {{\n  step [\n{step}  ]\n}}",
    )


def model_yaml(model: ModelSpec) -> str:
    """model.yaml of a subserver, in the manner of NVIDIA's llmapi models."""
    content: dict[str, Any] = {"engine": model.engine, "model": model.checkpoint}
    if model.engine == "tensorrt_llm":
        content["gpus"] = list(model.gpus)
    if model.load_after:
        content["load_after"] = list(model.load_after)
    text = yaml.dump({**content, **model.options}, Dumper=_Dumper, sort_keys=False, width=115)
    return f"{_GENERATED}\n{text}"


def built_yaml(spec: DeploymentSpec) -> str:
    """The completed deployment, from which all other files follow."""
    content: dict[str, Any] = msgspec.to_builtins(replace(spec, entry=placed(spec.entry)))
    for done in ("checkpoints", "tuning"):  # paths are absolute, and what the search found stands in `batching`
        del content[done]
    return f"{_BUILT}\n{yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=115)}"


class _Dumper(Dumper):
    """Lists stand in one line: there are some of hundreds of numbers."""


_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True))


_DECOUPLED = "model_transaction_policy { decoupled: true }"
_INSTANCE = "instance_group [ { count: 1, kind: KIND_CPU } ]"


def _join(*parts: str) -> str:
    return "\n".join(parts) + "\n"


def _head(name: str, max_batch_size: int) -> str:
    return f'{_GENERATED}\nname: "{name}"\nbackend: "{BACKEND}"\nmax_batch_size: {max_batch_size}\n{_DECOUPLED}'


def _inputs(table: Mapping[str, Input]) -> str:
    return f"input [\n{_list(_input(name, tensor) for name, tensor in table.items())}\n]"


def _input(name: str, tensor: Input) -> str:
    return f'{{ name: "{name}", data_type: TYPE_{tensor.type}, dims: {_dims(tensor.dims)}, optional: true }}'


def _outputs(table: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    lines = (
        f'{{ name: "{name}", data_type: TYPE_{kind}, dims: {_dims(dims)} }}' for name, (kind, dims) in table.items()
    )
    return f"output [\n{_list(lines)}\n]"


def _list(lines: Iterable[str]) -> str:
    return ",\n".join(f"  {line}" for line in lines)


def _dims(dims: tuple[int, ...]) -> str:
    return f"[ {', '.join(str(size) for size in dims)} ]"


def _mapping(field: str, name: str) -> str:
    return f'      {field} {{ key: "{name}", value: "{name}" }}\n'


def _batching(batching: BatchingSpec) -> str:
    return (
        "# A step starts when this many requests are ready (residents included), or after the delay.\n"
        "dynamic_batching {\n"
        f"  preferred_batch_size: [ {batching.threshold} ]\n"
        f"  max_queue_delay_microseconds: {batching.max_queue_delay_microseconds}\n"
        "}"
    )


def _parameters(parameters: Mapping[str, str]) -> str:
    lines = (
        f"parameters {{ key: {json.dumps(key)}, value: {{ string_value: {json.dumps(value)} }} }}"
        for key, value in parameters.items()
    )
    return "\n".join(lines)
