"""model.yaml of a TensorRT-LLM model: arguments of `LLM`, as in NVIDIA's llmapi models, and three of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenrouter.checkpoint import load_tokenizer, read_json, vocabulary_size
from tokenrouter.engines.base import EngineInfo
from tokenrouter.engines.tensorrt_llm import facts
from tokenrouter.errors import ConfigError
from tokenrouter.yaml_files import merged


class OwnOptions(msgspec.Struct, frozen=True):
    """Keys of model.yaml that are not TensorRT-LLM's.

    Attributes:
        gpus: indices of the GPUs to show to the engine; empty leaves CUDA_VISIBLE_DEVICES alone.
        handoff_ids: ids that the model never means, to end visits with; one per model of a deployment is needed. By
            default all within the logits that the tokenizer has no token for.
        router_token: what a router inside the model is given where it reads the token just sampled, which is not known
            there. `argmax`: the likeliest; `sampled`: requests where that makes a difference are refused.
    """

    gpus: tuple[int, ...] = ()
    handoff_ids: tuple[int, ...] | None = None
    router_token: Literal["sampled", "argmax"] = "sampled"


OWN_KEYS = OwnOptions.__struct_fields__

NESTED = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "torch_compile_config": "TorchCompileConfig",
}

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_batch_size": 32,
    "max_num_tokens": 8192,
    "disable_overlap_scheduler": True,
    "enable_chunked_prefill": True,
    "enable_iter_perf_stats": True,
    "kv_cache_config": {
        "tokens_per_block": 32,
        "enable_block_reuse": True,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
    },
    "scheduler_config": {
        "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
        "context_chunking_policy": "EQUAL_PROGRESS",
    },
}

# What may not differ from its value here, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "skip_tokenizer_init": (True, "token ids go in and out"),
    "disable_overlap_scheduler": (True, "with it the router is shown a history that lags one token"),
    "enable_chunked_prefill": (True, "whoever comes behind a history that does not fit into a step would wait as well"),
    "max_beam_width": (1, "a routed response is one sequence"),
    "speculative_config": (None, "logits processors, and so the router, do not work with speculative decoding"),
    "batch_wait_timeout_ms": (0, "it would stall every step of a running batch; delayed batching is done in front"),
    "batch_wait_timeout_iters": (0, "delayed batching is done in front"),
    "pipeline_parallel_size": (
        1,
        "no source confirms that routers run on the rank that has the logits; add GPUs to gpus",
    ),
    "context_parallel_size": (1, "as with pipeline_parallel_size; add GPUs to gpus"),
    "enable_attention_dp": (False, "a request that comes back may reach a rank that does not hold its KV"),
    "backend": ("pytorch", "only the PyTorch backend calls logits processors that are plain Python"),
    "kv_cache_config.enable_block_reuse": (True, "a request that comes back would run its whole history again"),
    "scheduler_config.capacity_scheduler_policy": ("GUARANTEED_NO_EVICT", "a request that was paused skips the router"),
}


# What NVIDIA's own models for Triton read, and what does it here.
_ELSEWHERE = {
    "gpu_device_ids": "name the model's GPUs as gpus, for example [0, 1]; a second instance is a model of its own",
    "triton_config": "config.pbtxt is written by tools.build_repository; batch sizes are max_batch_size",
}


@dataclass(frozen=True)
class TensorRtLlmConfig:
    """A TensorRT-LLM model's settings.

    Attributes:
        arguments: of `LLM`, with our defaults; nested ones are still plain dictionaries.
        given: names of arguments that the file sets itself; those cannot be left out.
        own: our own keys, with all `handoff_ids` resolved.
        info: facts about the engine that follow.
    """

    arguments: dict[str, Any]
    given: frozenset[str]
    own: OwnOptions
    info: EngineInfo

    @classmethod
    def from_mapping(cls, checkpoint: Path, options: Mapping[str, Any]) -> TensorRtLlmConfig:
        """Settings from model.yaml and the checkpoint's config.json.

        Raises:
            ConfigError: an unknown name, a setting that cannot work here, or one that is missing.
        """
        given = {key: value for key, value in options.items() if key not in OWN_KEYS}
        arguments = merged(DEFAULTS, given)
        own = _own({key: value for key, value in options.items() if key in OWN_KEYS}, checkpoint)
        described = read_json(checkpoint / "config.json")
        max_context = arguments.get("max_seq_len") or described.get("max_position_embeddings")
        arguments.update(model=str(checkpoint), max_seq_len=max_context)
        for problem in (*unknown(arguments), *_refused(arguments)):
            raise ConfigError(f"model.yaml: {problem}")
        block_tokens = int(arguments["kv_cache_config"]["tokens_per_block"])
        info = EngineInfo(
            name="tensorrt_llm",
            vocab_size=vocabulary_size(checkpoint),
            hidden_size=int(described.get("hidden_size", 0)),
            max_context=int(arguments["max_seq_len"]),
            block_tokens=block_tokens,
            kv_blocks=int(arguments["kv_cache_config"]["max_tokens"]) // block_tokens,
            max_batch=int(arguments["max_batch_size"]),
            max_num_tokens=int(arguments["max_num_tokens"]),
        )
        return cls(arguments, frozenset(given), own, info)


def unknown(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Names that this release does not know, as error texts."""
    tables = [("", "TorchLlmArgs", arguments)]
    tables += [(f"{key}.", name, arguments.get(key) or {}) for key, name in NESTED.items()]
    for prefix, name, table in tables:
        # What is not known to be in this release is left out at load, with a warning, where it is not.
        known = {parameter.name for parameter in facts.surface(f"tensorrt_llm.llmapi.{name}").parameters}
        offered = ", ".join(sorted({*known, *(() if prefix else OWN_KEYS)}))
        for key in table:
            if not prefix and key in _ELSEWHERE:
                yield f"{key} is a setting of NVIDIA's llmapi models: {_ELSEWHERE[key]}"
            elif key not in known:
                yield f"{prefix}{key} is no argument of TensorRT-LLM {facts.VERSION}; known: {offered}"


def _refused(arguments: Mapping[str, Any]) -> Iterator[str]:
    for path, (only, why) in _FIXED.items():
        key, _, inner = path.partition(".")
        table = arguments if not inner else arguments.get(key) or {}
        value = table.get(inner or key, only)
        if str(value) != str(only):
            yield f"{path} is {value!r}, but has to be {only!r}: {why}"
    if not arguments["max_seq_len"]:
        yield "max_seq_len is missing, and config.json has no max_position_embeddings"
    if not arguments["kv_cache_config"].get("max_tokens"):
        yield "kv_cache_config.max_tokens is missing; requests are admitted by it (tools.kv_budget computes it)"


def _own(options: dict[str, Any], checkpoint: Path) -> OwnOptions:
    width = vocabulary_size(checkpoint)
    try:
        own = msgspec.convert(options, OwnOptions)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"model.yaml: {exc}") from exc
    ids = own.handoff_ids
    if ids is None:
        used = set(load_tokenizer(checkpoint).get_vocab(with_added_tokens=True).values())
        ids = tuple(token for token in range(width) if token not in used)
    if len(set(ids)) != len(ids) or not all(0 <= token < width for token in ids):
        raise ConfigError(f"model.yaml: handoff_ids is {ids}; name different token ids in [0, {width})")
    return msgspec.structs.replace(own, handoff_ids=ids)
