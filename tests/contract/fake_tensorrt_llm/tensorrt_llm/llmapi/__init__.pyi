"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from tensorrt_llm import LLM as LLM
from tensorrt_llm.sampling_params import SamplingParams as SamplingParams
from tensorrt_llm.executor.result import Logprob

class TorchLlmArgs:
    model: str | Path
    tokenizer: Any
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    tensor_parallel_size: int
    dtype: str
    revision: str | None
    tokenizer_revision: str | None
    backend: str | None
    pipeline_parallel_size: int
    context_parallel_size: int
    moe_cluster_parallel_size: Any
    moe_tensor_parallel_size: Any
    moe_expert_parallel_size: Any
    max_batch_size: int | None
    max_num_tokens: int | None
    max_seq_len: int | None
    max_input_len: int | None
    max_beam_width: int | None
    enable_chunked_prefill: bool
    kv_cache_config: KvCacheConfig
    stream_interval: int
    batched_logits_processor: Any
    speculative_config: Any
    guided_decoding_backend: Any
    enable_lora: bool
    lora_config: Any
    load_format: Any
    cuda_graph_config: CudaGraphConfig | None
    disable_overlap_scheduler: bool
    attn_backend: str
    sampler_type: str
    attention_dp_config: Any
    moe_config: Any
    enable_attention_dp: bool
    allreduce_strategy: str
    gpus_per_node: int | None
    print_iter_log: bool
    garbage_collection_gen0_threshold: int
    scheduler_config: SchedulerConfig
    batch_wait_timeout_ms: float
    batch_wait_timeout_iters: int
    batch_wait_max_tokens_ratio: float
    enable_iter_perf_stats: bool
    enable_iter_req_stats: bool
    return_perf_metrics: bool
    gather_generation_logits: bool
    perf_metrics_max_requests: int
    iter_stats_max_iterations: int | None
    torch_compile_config: TorchCompileConfig | None
    num_postprocess_workers: int
    postprocess_tokenizer_dir: Any
    kv_connector_config: Any
    checkpoint_loader: Any
    checkpoint_format: Any
    orchestrator_type: Any
    def __init__(
        self,
        *,
        model: str | Path,
        tokenizer: Any = ...,
        tokenizer_mode: str = ...,
        skip_tokenizer_init: bool = ...,
        trust_remote_code: bool = ...,
        tensor_parallel_size: int = ...,
        dtype: str = ...,
        revision: str | None = ...,
        tokenizer_revision: str | None = ...,
        backend: str | None = ...,
        pipeline_parallel_size: int = ...,
        context_parallel_size: int = ...,
        moe_cluster_parallel_size: Any = ...,
        moe_tensor_parallel_size: Any = ...,
        moe_expert_parallel_size: Any = ...,
        max_batch_size: int | None = ...,
        max_num_tokens: int | None = ...,
        max_seq_len: int | None = ...,
        max_input_len: int | None = ...,
        max_beam_width: int | None = ...,
        enable_chunked_prefill: bool = ...,
        kv_cache_config: KvCacheConfig = ...,
        stream_interval: int = ...,
        batched_logits_processor: Any = ...,
        speculative_config: Any = ...,
        guided_decoding_backend: Any = ...,
        enable_lora: bool = ...,
        lora_config: Any = ...,
        load_format: Any = ...,
        cuda_graph_config: CudaGraphConfig | None = ...,
        disable_overlap_scheduler: bool = ...,
        attn_backend: str = ...,
        sampler_type: str = ...,
        attention_dp_config: Any = ...,
        moe_config: Any = ...,
        enable_attention_dp: bool = ...,
        allreduce_strategy: str = ...,
        gpus_per_node: int | None = ...,
        print_iter_log: bool = ...,
        garbage_collection_gen0_threshold: int = ...,
        scheduler_config: SchedulerConfig = ...,
        batch_wait_timeout_ms: float = ...,
        batch_wait_timeout_iters: int = ...,
        batch_wait_max_tokens_ratio: float = ...,
        enable_iter_perf_stats: bool = ...,
        enable_iter_req_stats: bool = ...,
        return_perf_metrics: bool = ...,
        gather_generation_logits: bool = ...,
        perf_metrics_max_requests: int = ...,
        iter_stats_max_iterations: int | None = ...,
        torch_compile_config: TorchCompileConfig | None = ...,
        num_postprocess_workers: int = ...,
        postprocess_tokenizer_dir: Any = ...,
        kv_connector_config: Any = ...,
        checkpoint_loader: Any = ...,
        checkpoint_format: Any = ...,
        orchestrator_type: Any = ...,
    ) -> None: ...

class KvCacheConfig:
    enable_block_reuse: bool
    max_tokens: int | None
    max_attention_window: Any
    sink_token_length: Any
    free_gpu_memory_fraction: float | None
    host_cache_size: int | None
    onboard_blocks: bool
    cross_kv_cache_fraction: float | None
    secondary_offload_min_priority: int | None
    event_buffer_max_size: int
    attention_dp_events_gather_period_ms: int
    enable_partial_reuse: bool
    copy_on_partial_reuse: bool
    use_uvm: bool
    max_gpu_total_bytes: int
    dtype: str
    mamba_ssm_cache_dtype: str
    tokens_per_block: int
    def __init__(
        self,
        *,
        enable_block_reuse: bool = ...,
        max_tokens: int | None = ...,
        max_attention_window: Any = ...,
        sink_token_length: Any = ...,
        free_gpu_memory_fraction: float | None = ...,
        host_cache_size: int | None = ...,
        onboard_blocks: bool = ...,
        cross_kv_cache_fraction: float | None = ...,
        secondary_offload_min_priority: int | None = ...,
        event_buffer_max_size: int = ...,
        attention_dp_events_gather_period_ms: int = ...,
        enable_partial_reuse: bool = ...,
        copy_on_partial_reuse: bool = ...,
        use_uvm: bool = ...,
        max_gpu_total_bytes: int = ...,
        dtype: str = ...,
        mamba_ssm_cache_dtype: str = ...,
        tokens_per_block: int = ...,
    ) -> None: ...

class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy
    context_chunking_policy: Any
    dynamic_batch_config: Any
    def __init__(
        self,
        *,
        capacity_scheduler_policy: CapacitySchedulerPolicy = ...,
        context_chunking_policy: Any = ...,
        dynamic_batch_config: Any = ...,
    ) -> None: ...

class CapacitySchedulerPolicy(str, Enum):
    MAX_UTILIZATION = 'MAX_UTILIZATION'
    GUARANTEED_NO_EVICT = 'GUARANTEED_NO_EVICT'
    STATIC_BATCH = 'STATIC_BATCH'

class CudaGraphConfig:
    batch_sizes: list[int] | None
    max_batch_size: int
    enable_padding: bool
    def __init__(
        self,
        *,
        batch_sizes: list[int] | None = ...,
        max_batch_size: int = ...,
        enable_padding: bool = ...,
    ) -> None: ...

class TorchCompileConfig:
    enable_fullgraph: bool
    enable_inductor: bool
    enable_piecewise_cuda_graph: bool
    capture_num_tokens: list[int] | None
    enable_userbuffers: bool
    max_num_streams: int
    def __init__(
        self,
        *,
        enable_fullgraph: bool = ...,
        enable_inductor: bool = ...,
        enable_piecewise_cuda_graph: bool = ...,
        capture_num_tokens: list[int] | None = ...,
        enable_userbuffers: bool = ...,
        max_num_streams: int = ...,
    ) -> None: ...

class KvCacheRetentionConfig:
    def __init__(
        self,
        token_range_retention_configs: list[KvCacheRetentionConfig.TokenRangeRetentionConfig],
        decode_retention_priority: int = ...,
        decode_duration_ms: timedelta | None = ...,
        transfer_mode: Any = ...,
        directory: Any = ...,
    ) -> None: ...

    class TokenRangeRetentionConfig:
        def __init__(
            self,
            token_start: int,
            token_end: int | None,
            priority: int,
            duration_ms: timedelta | None = ...,
        ) -> None: ...

class DisaggregatedParams:
    request_type: Any
    first_gen_tokens: Any
    ctx_request_id: Any
    opaque_state: Any
    draft_tokens: Any
    def __init__(
        self,
        *,
        request_type: Any = ...,
        first_gen_tokens: Any = ...,
        ctx_request_id: Any = ...,
        opaque_state: Any = ...,
        draft_tokens: Any = ...,
    ) -> None: ...

class RequestOutput:
    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    context_logits: Tensor | None
    finished: bool
    cached_tokens: int
    decoding_iter: int
    avg_decoded_tokens_per_iter: float | None
    def __aiter__(
        self,
    ) -> RequestOutput: ...
    async def __anext__(
        self,
    ) -> RequestOutput: ...
    async def aresult(
        self,
    ) -> RequestOutput: ...
    def abort(
        self,
    ) -> None: ...
    def aborted(
        self,
    ) -> bool: ...
    def result(
        self,
        timeout: float | None = ...,
    ) -> RequestOutput: ...

class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]]
    prompt_logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    generation_logits: Tensor | None
    additional_context_outputs: dict[str, Tensor] | None
    additional_generation_outputs: dict[str, Tensor] | None
    disaggregated_params: DisaggregatedParams | None
    request_perf_metrics: Any
    length: int
    text_diff: str
    token_ids_diff: list[int]
    logprobs_diff: list[dict[int, Logprob]]
