"""What this project relies on in TensorRT-LLM, as data: names and signatures; what it does is in `behaviours`.

Each entry says which source file of TensorRT-LLM it comes from, and `unconfirmed` says what could not be read there.
The adapter's start-up check, `tools.check_tensorrt_llm` and the double in tests/contract all read these two, so a new
release means editing them. They were written down from versions of those files dated shortly before and after release
1.2.1, the version in NVIDIA's Triton images 26.04 to 26.07; the tree at that tag has not been read. Nothing is imported
from tensorrt_llm here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from tokenrouter.engines.tensorrt_llm.sources import ARGS, LLM, MODELING, RESULT, RETENTION, SAMPLING, SPECULATIVE

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


def _must(name: str, default: Any = REQUIRED) -> Parameter:
    return Parameter(name, default, essential=True)


def _optional(*names: str, default: Any = None) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, default) for name in names)


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
        Surface(module, f"{name}.forward", Kind.CALL, SPECULATIVE, _FORWARD, unconfirmed=base),
    )


SURFACES: Final[tuple[Surface, ...]] = (
    Surface("tensorrt_llm", "__version__", Kind.VALUE, "tensorrt_llm/version.py"),
    Surface("tensorrt_llm", "LLM", Kind.CONSTRUCTOR, LLM, (*_CONSTRUCTOR, _must("**kwargs"))),
    Surface(
        "tensorrt_llm",
        "LLM.generate_async",
        Kind.CALL,
        LLM,
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
    Surface("tensorrt_llm", "LLM.shutdown", Kind.CALL, LLM),
    Surface("tensorrt_llm", "LLM.get_stats", Kind.CALL, LLM, (Parameter("timeout", 2),), essential=False),
    Surface("tensorrt_llm", "LLM.get_stats_async", Kind.CALL, LLM, (Parameter("timeout", 2),), essential=False),
    Surface(
        "tensorrt_llm.llmapi",
        "TorchLlmArgs",
        Kind.MODEL,
        ARGS,
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
        ARGS,
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
        ARGS,
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
        ARGS,
        (_must("MAX_UTILIZATION"), _must("GUARANTEED_NO_EVICT"), _must("STATIC_BATCH")),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "ContextChunkingPolicy",
        Kind.ENUM,
        ARGS,
        (_must("FIRST_COME_FIRST_SERVED"), _must("EQUAL_PROGRESS")),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "CudaGraphConfig",
        Kind.MODEL,
        ARGS,
        (_must("batch_sizes", None), _must("max_batch_size", 0), _must("enable_padding", False)),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "TorchCompileConfig",
        Kind.MODEL,
        ARGS,
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
        RETENTION,
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
        RETENTION,
        (_must("token_start"), _must("token_end"), _must("priority"), *_optional("duration_ms")),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "RequestOutput",
        Kind.CLASS,
        RESULT,
        (_must("request_id"), _must("outputs"), _must("finished"), _must("cached_tokens")),
    ),
    Surface("tensorrt_llm.llmapi", "RequestOutput.__aiter__", Kind.CALL, RESULT),
    Surface("tensorrt_llm.llmapi", "RequestOutput.__anext__", Kind.COROUTINE, RESULT),
    Surface("tensorrt_llm.llmapi", "RequestOutput.abort", Kind.CALL, RESULT),
    # It takes the timeout and waits without one.
    Surface("tensorrt_llm.llmapi", "RequestOutput.result", Kind.CALL, RESULT, (Parameter("timeout", None),)),
    Surface(
        "tensorrt_llm.llmapi",
        "CompletionOutput",
        Kind.CLASS,
        RESULT,
        (_must("token_ids"), _must("finish_reason"), _must("stop_reason"), Parameter("request_perf_metrics")),
    ),
    Surface(
        "tensorrt_llm.executor.utils", "RequestError", Kind.CLASS, "tensorrt_llm/executor/utils.py", essential=False
    ),
    Surface(
        "tensorrt_llm.sampling_params",
        "SamplingParams",
        Kind.DATACLASS,
        SAMPLING,
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
    Surface("tensorrt_llm.sampling_params", "LogitsProcessor", Kind.CLASS, SAMPLING),
    Surface(
        "tensorrt_llm.sampling_params",
        "LogitsProcessor.__call__",
        Kind.CALL,
        SAMPLING,
        (_must("req_id"), _must("logits"), _must("token_ids"), _must("stream_ptr"), _must("client_id")),
    ),
    Surface(
        "tensorrt_llm._torch.models.modeling_utils",
        "register_auto_model",
        Kind.CALL,
        MODELING,
        (_must("name"),),
    ),
    Surface(
        "tensorrt_llm._torch.models.modeling_utils",
        "DecoderModelForCausalLM",
        Kind.CLASS,
        MODELING,
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


def surface(path: str) -> Surface:
    """The surface at a dotted path.

    Raises:
        KeyError: the table has no such path.
    """
    return _BY_PATH[path]


_BY_PATH = {entry.path: entry for entry in SURFACES}
