"""Arguments of TensorRT-LLM's `LLM` that a routed model needs, and what the deployment's own options change of them.

Names are TensorRT-LLM's (`tokenrouter.engines.tensorrt_llm.facts`); docs/tensorrt_llm.md says why each is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenrouter.engines.tensorrt_llm import facts

DEFAULT_MAX_BATCH_SIZE = 32
DEFAULT_MAX_NUM_TOKENS = 8192
# max_tokens decides; the fraction only has to allow it, also to a model that finds the GPU half full.
_FREE_FRACTION = 0.95
_NESTED = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "torch_compile_config": "TorchCompileConfig",
}


def complete(options: Mapping[str, Any], *, gpus: int, extend_tokens: int) -> dict[str, Any]:
    """All arguments, in a fixed order.

    Args:
        options: what the deployment says; nested tables are merged, None turns one off.
        gpus: how many the model is split over.
        extend_tokens: see `ModelSpec.extend_tokens`.
    """
    max_batch = int(options.get("max_batch_size") or DEFAULT_MAX_BATCH_SIZE)
    max_num_tokens = int(options.get("max_num_tokens") or max(DEFAULT_MAX_NUM_TOKENS, max_batch))
    defaults: dict[str, Any] = {
        "tensor_parallel_size": max(1, gpus),
        "dtype": "auto",
        "max_batch_size": max_batch,
        "max_num_tokens": max_num_tokens,
        # Without it a prompt, or a history to resume from, of more than max_num_tokens is refused.
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "tokens_per_block": 32,
            "enable_block_reuse": True,
            "enable_partial_reuse": True,
            "copy_on_partial_reuse": True,
            "free_gpu_memory_fraction": _FREE_FRACTION,
        },
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        # Decode-only steps.
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": graph_batch_sizes(max_batch)},
        # Steps with an extend: a resumed request is a context request, even for one token.
        "torch_compile_config": {
            "enable_piecewise_cuda_graph": True,
            "capture_num_tokens": list(range(1, min(max_batch + extend_tokens, max_num_tokens) + 1)),
        },
        "disable_overlap_scheduler": True,
        "stream_interval": 1,
    }
    return merged(defaults, options)


def graph_batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then multiples of 8: padding never doubles a step of more than four requests by much."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8), max_batch) if size <= max_batch})


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` with what is `given`; tables in both are merged."""
    result = dict(defaults)
    for key, value in given.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def problems(options: Mapping[str, Any]) -> Iterator[str]:
    """Names that this release of TensorRT-LLM does not know, with their path."""
    yield from _unknown("TorchLlmArgs", options, "")
    for key, surface in _NESTED.items():
        if isinstance(options.get(key), Mapping):
            yield from _unknown(surface, options[key], f"{key}.")


def _unknown(surface: str, given: Mapping[str, Any], prefix: str) -> Iterator[str]:
    known = facts.surface(f"tensorrt_llm.llmapi.{surface}").names
    for name in given:
        if name not in known:
            yield f"{prefix}{name} is no argument of TensorRT-LLM {facts.VERSION}; known: {', '.join(sorted(known))}"
