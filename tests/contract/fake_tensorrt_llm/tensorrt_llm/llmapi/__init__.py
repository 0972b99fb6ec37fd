"""The public interface."""

from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    SchedulerConfig,
    TorchCompileConfig,
    TorchLlmArgs,
)

__all__ = [
    "LLM",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "RequestOutput",
    "SchedulerConfig",
    "TorchCompileConfig",
    "TorchLlmArgs",
]
