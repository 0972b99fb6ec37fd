"""The public interface."""

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.llmapi.kv_cache_retention import KvCacheRetentionConfig
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    KvCacheConfig,
    SchedulerConfig,
    TorchCompileConfig,
    TorchLlmArgs,
)
from tensorrt_llm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchCompileConfig",
    "TorchLlmArgs",
]
