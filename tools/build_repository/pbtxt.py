"""The text files of a repository. Deterministic: equal specifications give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from tokenrouter.config.model_yaml import MAX_BATCH_SIZE
from tokenrouter.config.parameters import MAX_REQUEST_SECONDS
from tokenrouter.policies.cache import MAX_BYTES
from tokenrouter.replicas import replica_names
from tokenrouter.repository import BACKEND
from tokenrouter.request import Defaults, Limits
from tokenrouter.triton.tensors import (
    ENTRY_INPUTS,
    ENTRY_OUTPUTS,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    SUBSERVER_INPUTS,
    SUBSERVER_OUTPUTS,
    Input,
)
from tokenrouter.yaml_files import Dumper
from tools.build_repository.aliases import SHAPES
from tools.build_repository.hosts import addresses, entry_parameters, model_parameters
from tools.build_repository.routers import placed, policy_params, router_paths
from tools.build_repository.spec import AliasSpec, BatchingSpec, DeploymentSpec, EntrySpec, ModelSpec, QueueSpec

_GENERATED = "# Written by python -m tools.build_repository; change the deployment's YAML file and run it again."
_BUILT = """\
# The deployment as it was built, everything filled in. Written by python -m tools.build_repository; tools.dtmc apply
# and tools.tune change its thresholds and write the files that follow from it again."""


def entry_pbtxt(spec: DeploymentSpec) -> str:
    """config.pbtxt of the entry model."""
    return _entry(spec.entry.name, spec, role="orchestrator", decoupled=True)


def unary_pbtxt(spec: DeploymentSpec) -> str:
    """config.pbtxt of the entry model for clients without streams."""
    assert spec.entry.unary is not None
    return _entry(spec.entry.unary, spec, role="unary", decoupled=False)


def text_pbtxt(name: str, role: str, entry: EntrySpec, models: Mapping[str, ModelSpec]) -> str:
    """config.pbtxt of a model that only turns text into ids, or ids into text."""
    inputs, outputs = {
        "preprocessing": (PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS),
        "postprocessing": (POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS),
    }[role]
    return _join(
        _head(name, entry.max_batch_size, decoupled=False),
        _inputs(inputs),
        _outputs(outputs),
        _INSTANCE,
        _parameters(_entry_parameters(entry, models, role)),
    )


def _entry(name: str, spec: DeploymentSpec, *, role: str, decoupled: bool) -> str:
    parameters = _entry_parameters(spec.entry, spec.models, role)
    return _join(
        _head(name, spec.entry.max_batch_size, decoupled=decoupled),
        _inputs(ENTRY_INPUTS),
        _outputs(ENTRY_OUTPUTS),
        _INSTANCE,
        _parameters({**parameters, **entry_parameters(spec.models, spec.tls)}),
    )


def _entry_parameters(entry: EntrySpec, models: Mapping[str, ModelSpec], role: str) -> dict[str, str]:
    parameters = {
        "role": role,
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
    if entry.speculation is not None:
        parameters["speculation"] = msgspec.json.encode(entry.speculation).decode()
    if several := {name: replica_names(name, model.replicas) for name, model in models.items() if model.replicas > 1}:
        parameters["replicas"] = json.dumps(several)
    if entry.selectable_policies is not None:
        parameters["selectable_policies"] = ",".join(entry.selectable_policies)
    if entry.end_ids is not None:
        parameters["end_ids"] = ",".join(str(token) for token in entry.end_ids)
    for name in ("allow_added_tokens", "allow_special_tokens"):
        if getattr(entry, name):
            parameters[name] = "true"
    return parameters


def subserver_pbtxt(name: str, model: ModelSpec, spec: DeploymentSpec, *, replica_of: str) -> str:
    """config.pbtxt of a subserver; `replica_of` is the model that the entry model knows."""
    entry = spec.entry
    max_batch_size = max(int(model.options.get("max_batch_size", MAX_BATCH_SIZE)), model.batching.threshold)
    parameters = {"role": "subserver", "direct_kv_share": f"{model.direct_kv_share:g}"}
    if replica_of != name:
        parameters["replica_of"] = replica_of
    if entry.routed_orchestrators > 1:
        parameters["routed_orchestrators"] = str(entry.routed_orchestrators)
    if entry.unary is not None:
        parameters["unary_kv_share"] = f"{model.unary_kv_share:g}"
    if model.batching.batch_thresholds:
        table = {str(n): threshold for n, threshold in sorted(model.batching.batch_thresholds.items())}
        parameters["batch_thresholds"] = json.dumps(table)
    parameters["max_inflight"] = str(model.max_inflight)
    if model.max_request_seconds != MAX_REQUEST_SECONDS:
        parameters["max_request_seconds"] = str(model.max_request_seconds)
    if model.policy_cache_mib != MAX_BYTES >> 20:
        parameters["policy_cache_mib"] = str(model.policy_cache_mib)
    return _join(
        _head(name, max_batch_size, decoupled=True),
        _inputs(SUBSERVER_INPUTS),
        _outputs(SUBSERVER_OUTPUTS),
        _INSTANCE,
        _batching(model.batching),
        _parameters({**parameters, **model_parameters(model, spec.tls)}),
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


def alias_pbtxt(name: str, alias: AliasSpec, entry: EntrySpec) -> str:
    """config.pbtxt of an ensemble of one step: it costs no process, and a request no copy.

    Triton itself makes an ensemble decoupled if its step is.
    """
    shape = SHAPES[alias.shape]
    step = entry.name if alias.decoupled else entry.unary
    head_of_step = f'      model_name: "{step}"\n      model_version: -1\n'
    maps = "".join(_mapping("input_map", target, own) for own, target in shape.inputs.items())
    maps += "".join(_mapping("output_map", target, own) for own, target in shape.outputs.items())
    head = f'{_GENERATED}\nname: "{name}"\nplatform: "ensemble"'
    return _join(
        f"{head}\nmax_batch_size: {entry.max_batch_size if shape.batched else 0}\n{_transactions(alias.decoupled)}",
        _inputs({own: ENTRY_INPUTS[target] for own, target in shape.inputs.items()}),
        _outputs({own: ENTRY_OUTPUTS[target] for own, target in shape.outputs.items()}),
        f"ensemble_scheduling {{\n  step [\n    {{\n{head_of_step}{maps}    }}\n  ]\n}}",
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
    if not addresses(spec.models):
        del content["tls"]
        for model in content["models"].values():
            del model["host"], model["listen"]
    return f"{_BUILT}\n{yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=115)}"


class _Dumper(Dumper):
    """Lists stand in one line: there are some of hundreds of numbers."""


_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True))


_INSTANCE = "instance_group [ { count: 1, kind: KIND_CPU } ]"


def _join(*parts: str) -> str:
    return "\n".join(parts) + "\n"


def _head(name: str, max_batch_size: int, *, decoupled: bool) -> str:
    head = f'{_GENERATED}\nname: "{name}"\nbackend: "{BACKEND}"\nmax_batch_size: {max_batch_size}'
    return f"{head}\n{_transactions(decoupled)}"


def _transactions(decoupled: bool) -> str:
    return f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}"


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


def _mapping(field: str, key: str, value: str) -> str:
    return f'      {field} {{ key: "{key}", value: "{value}" }}\n'


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
