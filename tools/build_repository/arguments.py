"""Engine arguments that a deployment leaves out, as far as they depend on a model's own entry only.

Those of TensorRT-LLM's `LLM` have its names and the adapter's (`tokenrouter.engines.tensorrt_llm.config`);
docs/tensorrt_llm.md says why each is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tokenrouter.engines.tensorrt_llm.config import DEFAULTS
from tokenrouter.yaml_files import merged
from tools.build_repository.replicas import replicas_of
from tools.build_repository.spec import DeploymentSpec, ModelSpec

# max_tokens decides; the fraction only has to allow it, also to a model that finds the GPU half full.
_FREE_FRACTION = 0.95


def with_arguments(spec: DeploymentSpec) -> DeploymentSpec:
    """The deployment with the arguments of every engine."""
    return replace(spec, models={name: _with_arguments(model) for name, model in spec.models.items()})


def _with_arguments(model: ModelSpec) -> ModelSpec:
    if model.engine == "tensorrt_llm":
        gpus = len(next(iter(replicas_of("", model).values())).gpus)
        options = tensorrt_llm(model.options, gpus=gpus, extend_tokens=model.extend_tokens)
        return replace(model, options=options)
    if model.engine == "torch" and len(model.gpus) == 1:
        return replace(model, options={"device": f"cuda:{model.gpus[0]}", **model.options})
    return model


def tensorrt_llm(options: Mapping[str, Any], *, gpus: int, extend_tokens: int) -> dict[str, Any]:
    """All arguments of TensorRT-LLM, in a fixed order.

    Args:
        options: what the deployment says; nested tables are merged, None turns one off.
        gpus: how many the model is split over.
        extend_tokens: see `ModelSpec.extend_tokens`.
    """
    max_batch = int(options.get("max_batch_size") or DEFAULTS["max_batch_size"])
    max_num_tokens = int(options.get("max_num_tokens") or max(DEFAULTS["max_num_tokens"], max_batch))
    ours: dict[str, Any] = {
        "tensor_parallel_size": max(1, gpus),
        "dtype": "auto",
        "max_batch_size": max_batch,
        "max_num_tokens": max_num_tokens,
        "kv_cache_config": {"free_gpu_memory_fraction": _FREE_FRACTION},
        # Decode-only steps.
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": graph_sizes(max_batch)},
        # Steps with an extend: a resumed request is a context request, even for one token.
        "torch_compile_config": {
            "enable_piecewise_cuda_graph": True,
            "capture_num_tokens": graph_sizes(min(max_batch + extend_tokens, max_num_tokens)),
        },
        "stream_interval": 1,
    }
    return merged(merged(DEFAULTS, ours), options)


def graph_sizes(most: int) -> list[int]:
    """Sizes for which CUDA graphs are captured; anything between two of them is padded to the next.

    1, 2, 4, multiples of 8 up to 64, and from there on steps of a quarter of the last power of two: each graph takes
    time at start-up and memory, and padding costs little as long as a step's time is that of reading the weights.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 3)))
    return [*(size for size in sizes if size < most), most]
