"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from tensorrt_llm.sampling_params import SamplingParams as SamplingParams
from tensorrt_llm.llmapi import DisaggregatedParams
from tensorrt_llm.llmapi import KvCacheRetentionConfig
from tensorrt_llm.llmapi import RequestOutput

__version__: str

class LLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = ...,
        tokenizer_mode: str = ...,
        skip_tokenizer_init: bool = ...,
        trust_remote_code: bool = ...,
        tensor_parallel_size: int = ...,
        dtype: str = ...,
        revision: str | None = ...,
        tokenizer_revision: str | None = ...,
        **kwargs: Any,
    ) -> None: ...
    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = ...,
        lora_request: Any = ...,
        prompt_adapter_request: Any = ...,
        streaming: bool = ...,
        kv_cache_retention_config: KvCacheRetentionConfig | None = ...,
        disaggregated_params: DisaggregatedParams | None = ...,
        _postproc_params: Any = ...,
        scheduling_params: Any = ...,
        cache_salt: str | None = ...,
    ) -> RequestOutput: ...
    def shutdown(
        self,
    ) -> None: ...
    def get_stats(
        self,
        timeout: float | None = ...,
    ) -> list[dict[str, Any]]: ...
