"""Arguments of `LLM` and the configuration objects among them and of a request."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from tensorrt_llm import _behaviour
from tensorrt_llm._table import Fields

NOT_MODELLED = {
    "pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "max_beam_width": 1,
    "skip_tokenizer_init": True,
    "disable_overlap_scheduler": True,
    "batch_wait_timeout_ms": 0,
    "batch_wait_timeout_iters": 0,
    "speculative_config": None,
    "enable_attention_dp": False,
    "num_postprocess_workers": 0,
    "lora_config": None,
    "kv_connector_config": None,
}
"""Settings whose effect the double does not have, with the only value it takes."""

CapacitySchedulerPolicy = Enum(  # type: ignore[misc]
    "CapacitySchedulerPolicy", [(name, name) for name in ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")]
)
ContextChunkingPolicy = Enum(  # type: ignore[misc]
    "ContextChunkingPolicy", [(name, name) for name in ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")]
)


class KvCacheConfig(Fields, path="tensorrt_llm.llmapi.KvCacheConfig"):
    """The paged KV cache."""


class SchedulerConfig(Fields, path="tensorrt_llm.llmapi.SchedulerConfig"):
    """Which requests share an iteration."""


class CudaGraphConfig(Fields, path="tensorrt_llm.llmapi.CudaGraphConfig"):
    """Captured decode batches."""


class TorchCompileConfig(Fields, path="tensorrt_llm.llmapi.TorchCompileConfig"):
    """Piecewise graphs."""


class KvCacheRetentionConfig(Fields, path="tensorrt_llm.llmapi.KvCacheRetentionConfig", error=TypeError):
    """Priorities of a request's blocks."""

    class TokenRangeRetentionConfig(
        Fields, path="tensorrt_llm.llmapi.KvCacheRetentionConfig.TokenRangeRetentionConfig", error=TypeError
    ):
        """Priority of a range of prompt tokens."""


class TorchLlmArgs(Fields, path="tensorrt_llm.llmapi.TorchLlmArgs"):
    """All arguments of `LLM`. Validation reads the GPU's properties."""

    def __init__(self, **kwargs: Any) -> None:
        if _behaviour.true("needs_gpu_for_arguments") and not torch.cuda.is_available():
            raise RuntimeError("No CUDA GPUs are available")
        super().__init__(**kwargs)

    @classmethod
    def for_llm(cls, arguments: dict[str, Any]) -> TorchLlmArgs:
        """What `LLM` makes of its arguments.

        Raises:
            ValueError: an argument that is no field.
        """
        unknown = sorted(arguments.keys() - cls.model_fields.keys())
        if unknown and _behaviour.true("unknown_arguments_refused"):
            raise ValueError(f"LLM: invalid arguments: {', '.join(unknown)}")
        self = cls.__new__(cls)
        Fields.__init__(self, **{name: value for name, value in arguments.items() if name in cls.model_fields})
        self.kv_cache_config = self.kv_cache_config or KvCacheConfig()
        self.scheduler_config = self.scheduler_config or SchedulerConfig()
        for name, only in NOT_MODELLED.items():
            if getattr(self, name) != only:
                raise NotImplementedError(f"the double models {name}={only!r} only, not {getattr(self, name)!r}")
        return self
