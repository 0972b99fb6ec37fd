"""Arguments of `LLM` and the configuration objects among them."""

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
    "batch_wait_timeout_ms": 0,
    "batch_wait_timeout_iters": 0,
    "speculative_config": None,
    "enable_attention_dp": False,
    "num_postprocess_workers": 0,
    "lora_config": None,
    "kv_connector_config": None,
}
"""Settings whose effect the double does not have, with the only value it takes."""


class CapacitySchedulerPolicy(str, Enum):
    """What happens when KV blocks run out."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class KvCacheConfig(Fields, path="tensorrt_llm.llmapi.KvCacheConfig"):
    """The paged KV cache."""


class SchedulerConfig(Fields, path="tensorrt_llm.llmapi.SchedulerConfig"):
    """Which requests share an iteration."""


class CudaGraphConfig(Fields, path="tensorrt_llm.llmapi.CudaGraphConfig"):
    """Captured decode batches."""


class TorchCompileConfig(Fields, path="tensorrt_llm.llmapi.TorchCompileConfig"):
    """Piecewise graphs."""


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
        unknown = sorted(arguments.keys() - cls.model_fields.keys() - {"_mpi_session"})
        if unknown and _behaviour.true("unknown_arguments_refused"):
            raise ValueError(f"LLM: invalid arguments: {', '.join(unknown)}")
        arguments = {name: value for name, value in arguments.items() if name in cls.model_fields}
        self = cls.__new__(cls)
        Fields.__init__(self, **arguments)
        self.kv_cache_config = self.kv_cache_config or KvCacheConfig()
        self.scheduler_config = self.scheduler_config or SchedulerConfig()
        if "cuda_graph_config" not in arguments:
            self.cuda_graph_config = CudaGraphConfig()
        for name, only in NOT_MODELLED.items():
            if getattr(self, name) != only:
                raise NotImplementedError(f"the double models {name}={only!r} only, not {getattr(self, name)!r}")
        return self
