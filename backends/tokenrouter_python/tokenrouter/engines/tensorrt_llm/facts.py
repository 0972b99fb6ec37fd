"""What this project relies on in TensorRT-LLM, as data: names (`SURFACES`) and behaviours (`BEHAVIOURS`).

Each entry says which source file of TensorRT-LLM it comes from, and `unconfirmed` says what could not be read there.
The adapter's start-up check, `tools.check_tensorrt_llm` and the double in tests/contract all read it, so a new release
means editing this file. It was written down from versions of those files dated shortly before and after release 1.2.1,
the version in NVIDIA's Triton images 26.04 to 26.07; the tree at that tag has not been read. Nothing is imported from
tensorrt_llm here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

VERSION: Final = "1.2.1"
"""Release that this table describes, and the first one without a fault that gives wrong tokens (`UNSAFE`)."""

FIRST_SAFE_PRERELEASE: Final = "1.3.0rc12"
"""First pre-release of 1.3 that came after that fault was mended in the main branch (pull request 12673, April 2026).
1.3.0rc10 is from 31 March; 1.3.0rc11 and 1.3.0rc5.post2 may have it, which could not be confirmed."""

UNSAFE: Final = (
    "KV blocks of a prompt that is prefilled in chunks can be reused before they are computed there, which gives wrong "
    "tokens (TensorRT-LLM pull requests 12673 and 12770)"
)

WORKER_COMMAND: Final = "mpi4py.futures"
"""Part of the command line of worker processes: `python -m mpi4py.futures.server` (mpi4py/futures/_core.py)."""

REQUIRED: Final = inspect.Parameter.empty
"""Default of a parameter that must be given."""


class Kind(Enum):
    """How a surface is used, and so how it is inspected."""

    MODEL = "pydantic model: keyword arguments only, unknown ones are a ValueError"
    DATACLASS = "dataclass: keyword arguments only, unknown ones are a TypeError; only fields that are used are listed"
    CONSTRUCTOR = "class, constructed with parameters in this order"
    CALL = "function or method, parameters in this order"
    COROUTINE = "method that is awaited"
    CLASS = "class whose listed attributes are used"
    ENUM = "enumeration; parameters are its members"
    VALUE = "value of a module"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, field or attribute.

    Attributes:
        name: as in the source; `**name` takes any further keyword.
        default: its default, or REQUIRED.
        essential: the adapter cannot work without it.
        unconfirmed: not known to be in this release, so never passed without looking at the signature first.
    """

    name: str
    default: Any = REQUIRED
    essential: bool = False
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class Surface:
    """One class, function or method.

    Attributes:
        module: where the adapter imports it from.
        name: qualified name inside that module.
        kind: how it is used.
        source: file of TensorRT-LLM that defines it.
        parameters: what is known of it.
        essential: the adapter cannot work without it.
        unconfirmed: what could not be read in a source, empty if nothing.
    """

    module: str
    name: str
    kind: Kind
    source: str
    parameters: tuple[Parameter, ...] = ()
    essential: bool = True
    unconfirmed: str = ""

    @property
    def path(self) -> str:
        """Full dotted path."""
        return f"{self.module}.{self.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are known to be in this release."""
        return tuple(parameter.name for parameter in self.parameters if not parameter.unconfirmed)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Something that TensorRT-LLM does, and that its double in tests/contract does as long as it is not broken there.

    Attributes:
        text: what it does.
        source: file and function.
        unconfirmed: what could not be read in a source, empty if nothing.
    """

    text: str
    source: str
    unconfirmed: str = ""


def _must(name: str, default: Any = REQUIRED) -> Parameter:
    return Parameter(name, default, essential=True)


def _optional(*names: str, default: Any = None) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, default) for name in names)


_LLM = "tensorrt_llm/llmapi/llm.py"
_ARGS = "tensorrt_llm/llmapi/llm_args.py"
_SAMPLING = "tensorrt_llm/sampling_params.py"
_RESULT = "tensorrt_llm/executor/result.py"
_PROXY = "tensorrt_llm/executor/proxy.py"
_RETENTION = "cpp/tensorrt_llm/nanobind/executor/request.cpp"
_MODELING = "tensorrt_llm/_torch/models/modeling_utils.py"
_SPECULATIVE = "tensorrt_llm/_torch/models/modeling_speculative.py"
_PYEXECUTOR = "tensorrt_llm/_torch/pyexecutor"
_EXECUTOR = f"{_PYEXECUTOR}/py_executor.py"
_ENGINE = f"{_PYEXECUTOR}/model_engine.py, _execute_logit_post_processors"
_KV = "cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp"
_SCHEDULER = "cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp"

_CONSTRUCTOR = (
    _must("model"),
    *_optional("tokenizer"),
    Parameter("tokenizer_mode", "auto"),
    _must("skip_tokenizer_init", False),
    Parameter("trust_remote_code", False),
    _must("tensor_parallel_size", 1),
    _must("dtype", "auto"),
    *_optional("revision", "tokenizer_revision"),
)

STOCK_MODELS: Final[dict[str, str]] = {
    "Qwen3ForCausalLM": "tensorrt_llm._torch.models.modeling_qwen3",
    "Qwen2ForCausalLM": "tensorrt_llm._torch.models.modeling_qwen",
    "LlamaForCausalLM": "tensorrt_llm._torch.models.modeling_llama",
}
"""Model classes that can hold a router: the name in a checkpoint's `architectures`, and the class's module."""

_FORWARD = (
    _must("attn_metadata"),
    _must("input_ids", None),
    _must("position_ids", None),
    *_optional("inputs_embeds"),
    Parameter("return_context_logits", False),
    *_optional("spec_metadata"),
    _must("**kwargs"),
)


def _stock(name: str, module: str) -> tuple[Surface, ...]:
    source = module.replace(".", "/") + ".py"
    base = "that the class derives from SpecDecOneEngineForCausalLM in this release"
    return (
        Surface(module, name, Kind.CLASS, source),
        Surface(module, f"{name}.__init__", Kind.CALL, source, (_must("model_config"),)),
        Surface(module, f"{name}.forward", Kind.CALL, _SPECULATIVE, _FORWARD, unconfirmed=base),
    )


SURFACES: Final[tuple[Surface, ...]] = (
    Surface("tensorrt_llm", "__version__", Kind.VALUE, "tensorrt_llm/version.py"),
    Surface("tensorrt_llm", "LLM", Kind.CONSTRUCTOR, _LLM, (*_CONSTRUCTOR, _must("**kwargs"))),
    Surface(
        "tensorrt_llm",
        "LLM.generate_async",
        Kind.CALL,
        _LLM,
        (
            _must("inputs"),
            _must("sampling_params", None),
            *_optional("lora_request", "prompt_adapter_request"),
            _must("streaming", False),
            _must("kv_cache_retention_config", None),
            *_optional("disaggregated_params", "trace_headers", "_postproc_params", "scheduling_params"),
            _must("cache_salt", None),
        ),
        unconfirmed="the place of trace_headers; the adapter passes keywords",
    ),
    Surface("tensorrt_llm", "LLM.shutdown", Kind.CALL, _LLM),
    Surface("tensorrt_llm", "LLM.get_stats", Kind.CALL, _LLM, (Parameter("timeout", 2),), essential=False),
    Surface("tensorrt_llm", "LLM.get_stats_async", Kind.CALL, _LLM, (Parameter("timeout", 2),), essential=False),
    Surface(
        "tensorrt_llm.llmapi",
        "TorchLlmArgs",
        Kind.MODEL,
        _ARGS,
        (
            *_CONSTRUCTOR,
            *_optional("backend"),
            *_optional("pipeline_parallel_size", "context_parallel_size", default=1),
            *_optional("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"),
            _must("max_batch_size", 2048),
            _must("max_num_tokens", 8192),
            _must("max_seq_len", None),
            Parameter("max_input_len", 1024),
            _must("max_beam_width", 1),
            _must("enable_chunked_prefill", False),
            _must("kv_cache_config", None),
            _must("stream_interval", 1),
            *_optional("batched_logits_processor", "speculative_config", "guided_decoding_backend"),
            Parameter("enable_lora", False),
            *_optional("lora_config"),
            Parameter("load_format", "auto"),
            _must("cuda_graph_config", None),
            _must("disable_overlap_scheduler", False),
            Parameter("attn_backend", "TRTLLM"),
            _must("sampler_type", "auto"),
            *_optional("attention_dp_config", "moe_config"),
            Parameter("enable_attention_dp", False),
            Parameter("allreduce_strategy", "AUTO"),
            *_optional("gpus_per_node"),
            Parameter("print_iter_log", False),
            Parameter("garbage_collection_gen0_threshold", 20000),
            _must("scheduler_config", None),
            *_optional("batch_wait_timeout_ms", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", default=0),
            *_optional("enable_iter_perf_stats", "enable_iter_req_stats", "return_perf_metrics", default=False),
            Parameter("gather_generation_logits", False),
            Parameter("perf_metrics_max_requests", 0),
            *_optional("iter_stats_max_iterations"),
            _must("torch_compile_config", None),
            Parameter("num_postprocess_workers", 0),
            *_optional("postprocess_tokenizer_dir", "kv_connector_config", "checkpoint_loader", "checkpoint_format"),
            *_optional("orchestrator_type"),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "KvCacheConfig",
        Kind.MODEL,
        _ARGS,
        (
            _must("enable_block_reuse", True),
            _must("max_tokens", None),
            *_optional("max_attention_window", "sink_token_length"),
            _must("free_gpu_memory_fraction", 0.9),
            _must("host_cache_size", None),
            Parameter("onboard_blocks", True),
            *_optional("cross_kv_cache_fraction", "secondary_offload_min_priority"),
            Parameter("event_buffer_max_size", 0),
            Parameter("attention_dp_events_gather_period_ms", 5),
            _must("enable_partial_reuse", True),
            _must("copy_on_partial_reuse", True),
            Parameter("use_uvm", False),
            Parameter("max_gpu_total_bytes", 0),
            Parameter("dtype", "auto"),
            Parameter("mamba_ssm_cache_dtype", "auto"),
            _must("tokens_per_block", 32),
            # In the file of early 1.3.
            Parameter("use_kv_cache_manager_v2", False, unconfirmed=True),
            Parameter("max_util_for_resume", 0.95, unconfirmed=True),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "SchedulerConfig",
        Kind.MODEL,
        _ARGS,
        (
            _must("capacity_scheduler_policy", "GUARANTEED_NO_EVICT"),
            _must("context_chunking_policy", None),
            *_optional("dynamic_batch_config"),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "CapacitySchedulerPolicy",
        Kind.ENUM,
        _ARGS,
        (_must("MAX_UTILIZATION"), _must("GUARANTEED_NO_EVICT"), _must("STATIC_BATCH")),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "ContextChunkingPolicy",
        Kind.ENUM,
        _ARGS,
        (_must("FIRST_COME_FIRST_SERVED"), _must("EQUAL_PROGRESS")),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "CudaGraphConfig",
        Kind.MODEL,
        _ARGS,
        (_must("batch_sizes", None), _must("max_batch_size", 0), _must("enable_padding", False)),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "TorchCompileConfig",
        Kind.MODEL,
        _ARGS,
        (
            Parameter("enable_fullgraph", True),
            Parameter("enable_inductor", False),
            _must("enable_piecewise_cuda_graph", False),
            _must("capture_num_tokens", None),
            Parameter("enable_userbuffers", True),
            Parameter("max_num_streams", 1),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "KvCacheRetentionConfig",
        Kind.CONSTRUCTOR,
        _RETENTION,
        (
            _must("token_range_retention_configs"),
            _must("decode_retention_priority", 35),
            *_optional("decode_duration_ms", "transfer_mode", "directory"),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "KvCacheRetentionConfig.TokenRangeRetentionConfig",
        Kind.CONSTRUCTOR,
        _RETENTION,
        (_must("token_start"), _must("token_end"), _must("priority"), *_optional("duration_ms")),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "RequestOutput",
        Kind.CLASS,
        _RESULT,
        (_must("request_id"), _must("outputs"), _must("finished"), _must("cached_tokens")),
    ),
    Surface("tensorrt_llm.llmapi", "RequestOutput.__aiter__", Kind.CALL, _RESULT),
    Surface("tensorrt_llm.llmapi", "RequestOutput.__anext__", Kind.COROUTINE, _RESULT),
    Surface("tensorrt_llm.llmapi", "RequestOutput.abort", Kind.CALL, _RESULT),
    # It takes the timeout and waits without one.
    Surface("tensorrt_llm.llmapi", "RequestOutput.result", Kind.CALL, _RESULT, (Parameter("timeout", None),)),
    Surface(
        "tensorrt_llm.llmapi",
        "CompletionOutput",
        Kind.CLASS,
        _RESULT,
        (_must("token_ids"), _must("finish_reason"), _must("stop_reason"), Parameter("request_perf_metrics")),
    ),
    Surface(
        "tensorrt_llm.executor.utils", "RequestError", Kind.CLASS, "tensorrt_llm/executor/utils.py", essential=False
    ),
    Surface(
        "tensorrt_llm.sampling_params",
        "SamplingParams",
        Kind.DATACLASS,
        _SAMPLING,
        (
            _must("end_id", None),
            _must("max_tokens", 32),
            _must("stop_token_ids", None),
            _must("logits_processor", None),
            _must("top_k", None),
            _must("ignore_eos", False),
            _must("detokenize", True),
            Parameter("return_perf_metrics", False),
        ),
    ),
    Surface("tensorrt_llm.sampling_params", "LogitsProcessor", Kind.CLASS, _SAMPLING),
    Surface(
        "tensorrt_llm.sampling_params",
        "LogitsProcessor.__call__",
        Kind.CALL,
        _SAMPLING,
        (_must("req_id"), _must("logits"), _must("token_ids"), _must("stream_ptr"), _must("client_id")),
    ),
    Surface("tensorrt_llm._torch.models.modeling_utils", "register_auto_model", Kind.CALL, _MODELING, (_must("name"),)),
    Surface(
        "tensorrt_llm._torch.models.modeling_utils",
        "DecoderModelForCausalLM",
        Kind.CLASS,
        _MODELING,
        (_must("model"), _must("lm_head"), Parameter("model_config"), Parameter("config")),
    ),
    *(surface for name, module in STOCK_MODELS.items() for surface in _stock(name, module)),
    Surface(
        "tensorrt_llm._torch.attention_backend",
        "AttentionMetadata",
        Kind.CLASS,
        "tensorrt_llm/_torch/attention_backend/interface.py",
        (_must("seq_lens_cuda"), Parameter("num_contexts"), Parameter("request_ids")),
    ),
)

_B = Behaviour
BEHAVIOURS: Final[dict[str, Behaviour]] = {
    "unknown_arguments_refused": _B("LLM(**kwargs) raises ValueError for a name that is no field", _LLM),
    "needs_gpu_for_arguments": _B("TorchLlmArgs cannot be constructed by itself on a machine without a GPU", _ARGS),
    "end_id_needed": _B("without a tokenizer a request without end_id is refused", _LLM),
    "prompt_limit": _B("a prompt longer than max_num_tokens is refused without chunked prefill", _LLM),
    "returns_at_once": _B("generate_async returns before anything was computed", _LLM),
    "unknown_fields_refused": _B("SamplingParams raises TypeError for a name that is no field", _SAMPLING),
    "needs_running_loop": _B("async iteration works only if an event loop ran when the request was submitted", _RESULT),
    "same_object": _B("streaming yields one and the same object", _RESULT),
    "cumulative": _B("token_ids grows from response to response", _RESULT),
    "stop_ids_cut": _B("matched stop ids are cut off the last response", _RESULT),
    "end_id_kept": _B("the end id stays in token_ids", _RESULT),
    "stop_reason_only_for_stop_words": _B("stop_reason is None after the end id", _RESULT),
    "end_id_first": _B(
        "the end id is tested before the length", f"{_PYEXECUTOR}/sampler.py, TorchSampler._handle_stop_criteria"
    ),
    "length_before_stop_words": _B(
        "a stop id sampled as the last allowed token reports 'length' and is not cut",
        f"{_PYEXECUTOR}/sampler.py, TorchSampler._handle_stop_criteria",
    ),
    "late_abort": _B(
        "abort() acts at the end of the next iteration, which may still bring a token",
        f"{_EXECUTOR}, _handle_canceled_requests",
    ),
    "abort_reason": _B("an aborted request that was active ends with finish_reason 'cancelled'", _RESULT),
    "queued_abort_unanswered": _B(
        "an aborted request that was not active yet is dropped without an answer",
        f"{_EXECUTOR}, _handle_canceled_requests; {_PYEXECUTOR}/executor_request_queue.py, update_waiting_queue",
    ),
    "in_process_not_pickled": _B(
        "with TLLM_WORKER_USE_SINGLE_PROCESS=1 a request's own processor is called, not a copy that was pickled",
        "tensorrt_llm/executor/executor.py, create",
    ),
    "five_arguments": _B("processors get five positional arguments", _ENGINE),
    "no_stream_no_client": _B("the last two of them are None", _ENGINE),
    "logits_shape": _B("logits are a view of shape [1, 1, V]", _ENGINE),
    "logits_in_place": _B("what a processor writes into the logits counts", _ENGINE),
    "history_given": _B("token_ids is [prompt + generated]", _ENGINE),
    "first_token_processed": _B("processors also see the logits of the first token", _ENGINE),
    "chunks_processed": _B(
        "processors also see the logits after each chunk of a long prompt, with the whole prompt", _ENGINE
    ),
    "one_failure_fails_all": _B(
        "an exception in a processor fails every active request, those outside the step included",
        f"{_EXECUTOR}, _forward_step and _handle_errors",
    ),
    "vocabulary_checked": _B("a prompt id outside the vocabulary fails the request", f"{_EXECUTOR}, _validate_request"),
    "batched": _B("requests that are ready together share one forward pass", _SCHEDULER),
    "whole_prompt_charged": _B(
        "the scheduler charges a resumed request its whole prompt: its prefix is looked up afterwards",
        f"{_SCHEDULER}; {_PYEXECUTOR}/resource_manager.py, KVCacheManager.prepare_resources",
    ),
    "equal_progress": _B(
        "with EQUAL_PROGRESS prompts that do not fit together get one block of tokens each in turn", _SCHEDULER
    ),
    "reuse": _B("a prompt's longest stored prefix is not computed again, and cached_tokens says how long it was", _KV),
    "reuse_capped": _B("at least the last prompt token is computed", _KV),
    "partial_reuse": _B("without enable_partial_reuse only whole blocks are reused", _KV),
    "last_token_not_stored": _B("the last token of a response is not in the cache", _KV),
    "generated_stored": _B("generated tokens can be reused too", _KV),
    "stored_at_the_end": _B(
        "generated tokens are stored when the request ends, those of the prompt after each chunk",
        f"{_PYEXECUTOR}/resource_manager.py, KVCacheManager.update_resources and free_resources",
    ),
    "stored_before_answer": _B(
        "a request submitted after the final response finds its blocks: they are stored before the next fetch",
        f"{_EXECUTOR}, _handle_responses",
    ),
    "salted": _B("only requests with the same cache_salt share blocks", _KV),
    "evicts_least_recent": _B("among equals the block used longest ago goes first", _KV),
    "evicts_low_priority_first": _B("retention priorities order the eviction", _KV),
    "pool_capped": _B(
        "the pool holds the smaller of max_tokens and the share of the memory, without a word",
        f"{_PYEXECUTOR}/_util.py, KvCacheCreator.configure_kv_cache_capacity",
    ),
    "padding_takes_a_block": _B(
        "with padded CUDA graphs one KV block belongs to the request that pads", f"{_PYEXECUTOR}/cuda_graph_runner.py"
    ),
    "manager_in_frames": _B(
        "a processor finds the KV manager through the local `resource_manager` of its callers",
        f"{_PYEXECUTOR}/model_engine.py, forward",
        unconfirmed="that the frame of `forward` is below the processor's in this release; else the setting is trusted",
    ),
    "iterations_told": _B(
        "with enable_iter_perf_stats every iteration is told, with iter, iterLatencyMS, numActiveRequests, "
        "numNewActiveRequests, and in inflightBatchingStats numContextRequests, numGenRequests and numCtxTokens, the "
        "last without what was found in the cache",
        f"{_EXECUTOR}, _update_iter_stats; cpp/tensorrt_llm/executor/jsonSerialization.cpp",
    ),
    "iteration_includes_wait": _B(
        "an iteration's latency begins before the loop waits for requests", f"{_EXECUTOR}, _executor_loop"
    ),
    "idle_iterations_repeat": _B(
        "an iteration that runs no step tells the numbers of the one before", f"{_EXECUTOR}, _executor_loop"
    ),
    "iterations_end": _B(
        "iterating over them ends when none comes in time, and from then on at once until the next submission",
        f"{_RESULT}, IterationResult",
        unconfirmed="which of two ways 1.2.1 has; with the other one, known by the executor's rpc_client, get_stats "
        "asks the worker and returns",
    ),
    "iterations_of_a_loop": _B(
        "get_stats is a TypeError if an event loop ran at the first submission",
        "tensorrt_llm/llmapi/utils.py, _SyncQueue.get; tensorrt_llm/executor/result.py, IterationResult.get_results",
        unconfirmed="as for iterations_end",
    ),
    "requests_timed": _B(
        "with return_perf_metrics the final output has first_iter, the iteration of the first token, and when the "
        "request was first scheduled, behind the wait, and when that token came",
        "cpp/include/tensorrt_llm/batch_manager/llmRequest.h, updatePerfMetrics; "
        f"{_PYEXECUTOR}/seq_slot_manager.py, prepare_resources",
        unconfirmed="that first_iter and iter count alike in this release",
    ),
    "model_registered": _B("a class registered for the checkpoint's architecture replaces the stock class", _MODELING),
    "workers_named": _B(
        f"worker processes descend from this one, with {WORKER_COMMAND!r} in their command line",
        "tensorrt_llm/llmapi/mpi_session.py, MpiPoolSession",
        unconfirmed="that what Open MPI spawns stays a descendant of this process",
    ),
    "dead_worker_silent": _B(
        "when a worker dies, requests in flight are told nothing, and the next submission raises",
        f"{_PROXY}, mpi_done_callback and _handle_background_error",
        unconfirmed="whether the future of a killed MPI process completes at all",
    ),
}
"""By the name of the switch that breaks it in the double."""


def surface(path: str) -> Surface:
    """The surface at a dotted path.

    Raises:
        KeyError: the table has no such path.
    """
    return _BY_PATH[path]


_BY_PATH = {entry.path: entry for entry in SURFACES}
