"""model.yaml of a TensorRT-LLM model: arguments of `LLM`, as in NVIDIA's llmapi models, and three of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenrouter.engines.folder import load_tokenizer, read_json, vocabulary_size
from tokenrouter.engines.tensorrt_llm import facts
from tokenrouter.errors import ConfigError


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
    "kv_cache_config": {
        "tokens_per_block": 32,
        "enable_block_reuse": True,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
    },
    "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
}

# What may not differ from its value here, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "skip_tokenizer_init": (True, "token ids go in and out"),
    "disable_overlap_scheduler": (True, "with it the router is shown a history that lags one token"),
    "max_beam_width": (1, "a routed response is one sequence"),
    "speculative_config": (None, "logits processors, and so the router, do not work with speculative decoding"),
    "batch_wait_timeout_ms": (0, "it would stall every step of a running batch; delayed batching is done in front"),
    "batch_wait_timeout_iters": (0, "delayed batching is done in front"),
    "backend": ("pytorch", "only the PyTorch backend calls logits processors that are plain Python"),
    "kv_cache_config.enable_block_reuse": (True, "a request that comes back would run its whole history again"),
    "scheduler_config.capacity_scheduler_policy": (
        "GUARANTEED_NO_EVICT",
        "a paused request would go on without being shown to the router",
    ),
}


@dataclass(frozen=True)
class TensorRtLlmConfig:
    """A TensorRT-LLM model's settings.

    Attributes:
        arguments: of `LLM`, with our defaults; nested ones are still plain dictionaries.
        given: names of arguments that the file sets itself; those cannot be left out.
        gpus, router_token: see `OwnOptions`.
        handoff_ids: of which the first ones are reserved.
        vocab_size, hidden_size, max_context, block_tokens, kv_tokens: sizes, see `engines.base.EngineInfo`.
    """

    arguments: dict[str, Any]
    given: frozenset[str]
    gpus: tuple[int, ...]
    handoff_ids: tuple[int, ...]
    router_token: str
    vocab_size: int
    hidden_size: int
    max_context: int
    block_tokens: int
    kv_tokens: int

    @classmethod
    def from_mapping(cls, checkpoint: Path, options: Mapping[str, Any]) -> TensorRtLlmConfig:
        """Settings from model.yaml and the checkpoint's config.json.

        Raises:
            ConfigError: an unknown name, a setting that cannot work here, or one that is missing.
        """
        try:
            own = msgspec.convert({key: options[key] for key in OWN_KEYS if key in options}, OwnOptions)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"model.yaml: {exc}") from exc
        given = {key: value for key, value in options.items() if key not in OWN_KEYS}
        arguments = merged(DEFAULTS, given)
        for problem in (*unknown(arguments), *_refused(arguments)):
            raise ConfigError(f"model.yaml: {problem}")
        facts_of_model = read_json(checkpoint / "config.json")
        kv = arguments["kv_cache_config"]
        if not kv.get("max_tokens"):
            raise ConfigError(
                "model.yaml: kv_cache_config.max_tokens is missing; requests are admitted by it, so the pool's size "
                "must be known beforehand (tools.kv_budget computes it)"
            )
        max_context = arguments.get("max_seq_len") or facts_of_model.get("max_position_embeddings")
        if not max_context:
            raise ConfigError("model.yaml: max_seq_len is missing, and config.json has no max_position_embeddings")
        arguments.update(model=str(checkpoint), max_seq_len=int(max_context))
        vocab_size = vocabulary_size(checkpoint)
        return cls(
            arguments=arguments,
            given=frozenset(given),
            gpus=own.gpus,
            handoff_ids=_handoff_ids(checkpoint, own.handoff_ids, vocab_size),
            router_token=own.router_token,
            vocab_size=vocab_size,
            hidden_size=int(facts_of_model.get("hidden_size", 0)),
            max_context=int(max_context),
            block_tokens=int(kv["tokens_per_block"]),
            kv_tokens=int(kv["max_tokens"]),
        )


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` with what is `given`; dictionaries in both are merged."""
    result = dict(defaults)
    for key, value in given.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def unknown(arguments: Mapping[str, Any]) -> list[str]:
    """Names that this release does not know, as error texts."""
    problems = []
    tables = [("", "TorchLlmArgs", arguments)]
    tables += [(f"{key}.", name, arguments.get(key) or {}) for key, name in NESTED.items()]
    for prefix, name, table in tables:
        known = facts.surface(f"tensorrt_llm.llmapi.{name}").names
        more = OWN_KEYS if not prefix else ()
        problems += [
            f"{prefix}{key} is no argument of TensorRT-LLM {facts.VERSION}; known: {', '.join(sorted({*known, *more}))}"
            for key in table
            if key not in known
        ]
    return problems


def _refused(arguments: Mapping[str, Any]) -> list[str]:
    problems = []
    for path, (only, why) in _FIXED.items():
        key, _, inner = path.partition(".")
        table = arguments if not inner else arguments.get(key) or {}
        value = table.get(inner or key, only)
        if str(value) != str(only):
            problems.append(f"{path} is {value!r}, but has to be {only!r}: {why}")
    return problems


def _handoff_ids(checkpoint: Path, given: tuple[int, ...] | None, vocab_size: int) -> tuple[int, ...]:
    if given is None:
        used = set(load_tokenizer(checkpoint).get_vocab(with_added_tokens=True).values())
        return tuple(token for token in range(vocab_size) if token not in used)
    if len(set(given)) != len(given) or not all(0 <= token < vocab_size for token in given):
        raise ConfigError(f"model.yaml: handoff_ids is {given}; name different token ids in [0, {vocab_size})")
    return given
