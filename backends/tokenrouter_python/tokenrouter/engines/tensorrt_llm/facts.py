"""The part of TensorRT-LLM's Python interface that this project relies on, as data.

One table, `SURFACES`: which names exist, with which parameters and defaults, and which source file of TensorRT-LLM says
so. The adapter's start-up check, `tools.check_tensorrt_llm`, the double in tests/contract and its type stubs all read
it, so a new release means editing this file. It was written down from sources dated shortly before and after release
1.2.1, the version in NVIDIA's Triton images 26.04 to 26.07. Nothing is imported from tensorrt_llm here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

VERSION: Final = "1.2.1"

REQUIRED: Final = inspect.Parameter.empty
"""Default of a parameter that must be given."""


class Kind(Enum):
    """How a surface is used, and so how it is inspected."""

    MODEL = "pydantic model: keyword arguments only, unknown ones are a ValueError"
    DATACLASS = "dataclass: keyword arguments only, unknown ones are a TypeError"
    CONSTRUCTOR = "class, constructed with parameters in this order"
    CALL = "function or method, parameters in this order"
    COROUTINE = "method that is awaited"
    RESULT = "object that the library makes; only its attributes are used"
    CLASS = "class to subclass or to name; only listed attributes are used"
    ENUM = "enumeration; parameters are its members"
    VALUE = "value of a module; `returns` is its type"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, field or attribute.

    Attributes:
        name: as in the source; `**name` takes any further keyword.
        annotation: Python source of its type, for the type stubs.
        default: its default, or REQUIRED.
        essential: the adapter cannot work without it.
        unsure: not known to be in this release; never passed without looking at the signature first.
    """

    name: str
    annotation: str = "Any"
    default: Any = REQUIRED
    essential: bool = False
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Surface:
    """One class, function or method.

    Attributes:
        module: where the adapter imports it from.
        name: qualified name inside that module.
        kind: how it is used.
        source: file of TensorRT-LLM that defines it.
        parameters: what is known of it.
        returns: Python source of the return type of a CALL, or of the type of a VALUE.
        base: Python source of the base class, for the type stubs.
        essential: the adapter cannot work without it.
    """

    module: str
    name: str
    kind: Kind
    source: str
    parameters: tuple[Parameter, ...] = ()
    returns: str = "None"
    base: str = ""
    essential: bool = True

    @property
    def path(self) -> str:
        """Full dotted path."""
        return f"{self.module}.{self.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are known to be in this release."""
        return tuple(parameter.name for parameter in self.parameters if not parameter.unsure)


def _must(name: str, annotation: str, default: Any = REQUIRED) -> Parameter:
    return Parameter(name, annotation, default, essential=True)


def _optional(*names: str, annotation: str = "Any", default: Any = None) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, annotation, default) for name in names)


_LLM = "tensorrt_llm/llmapi/llm.py"
_ARGS = "tensorrt_llm/llmapi/llm_args.py"
_SAMPLING = "tensorrt_llm/sampling_params.py"
_RESULT = "tensorrt_llm/executor/result.py"
_RETENTION = "cpp/tensorrt_llm/nanobind/executor/request.cpp"
_MODELING = "tensorrt_llm/_torch/models/modeling_utils.py"

_CONSTRUCTOR = (
    _must("model", "str | Path"),
    Parameter("tokenizer", "Any", None),
    Parameter("tokenizer_mode", "str", "auto"),
    _must("skip_tokenizer_init", "bool", False),
    Parameter("trust_remote_code", "bool", False),
    _must("tensor_parallel_size", "int", 1),
    _must("dtype", "str", "auto"),
    Parameter("revision", "str | None", None),
    Parameter("tokenizer_revision", "str | None", None),
)

_STOCK = (
    ("modeling_qwen3", "Qwen3ForCausalLM"),
    ("modeling_qwen", "Qwen2ForCausalLM"),
    ("modeling_llama", "LlamaForCausalLM"),
)
_FORWARD = (
    _must("attn_metadata", "AttentionMetadata"),
    _must("input_ids", "Tensor | None", None),
    _must("position_ids", "Tensor | None", None),
    Parameter("inputs_embeds", "Tensor | None", None),
    Parameter("return_context_logits", "bool", False),
    Parameter("spec_metadata", "Any", None),
    Parameter("lora_params", "Any", None),
    _must("**kwargs", "Any"),
)


def _stock(module: str, name: str) -> tuple[Surface, ...]:
    """A stock model class, which a model with a router inside subclasses."""
    path, source = f"tensorrt_llm._torch.models.{module}", f"tensorrt_llm/_torch/models/{module}.py"
    return (
        Surface(path, name, Kind.CLASS, source, base="DecoderModelForCausalLM"),
        Surface(path, f"{name}.__init__", Kind.CALL, source, (_must("model_config", "Any"),)),
        Surface(path, f"{name}.forward", Kind.CALL, _MODELING, _FORWARD, returns="Any"),
    )


SURFACES: Final[tuple[Surface, ...]] = (
    Surface("tensorrt_llm", "__version__", Kind.VALUE, "tensorrt_llm/version.py", returns="str"),
    Surface("tensorrt_llm", "LLM", Kind.CONSTRUCTOR, _LLM, (*_CONSTRUCTOR, _must("**kwargs", "Any"))),
    Surface(
        "tensorrt_llm",
        "LLM.generate_async",
        Kind.CALL,
        _LLM,
        (
            _must("inputs", "Any"),
            _must("sampling_params", "SamplingParams | None", None),
            *_optional("lora_request", "prompt_adapter_request"),
            _must("streaming", "bool", False),
            _must("kv_cache_retention_config", "KvCacheRetentionConfig | None", None),
            Parameter("disaggregated_params", "DisaggregatedParams | None", None),
            Parameter("trace_headers", "Any", None, unsure=True),
            *_optional("_postproc_params", "scheduling_params"),
            _must("cache_salt", "str | None", None),
        ),
        returns="RequestOutput",
    ),
    Surface("tensorrt_llm", "LLM.shutdown", Kind.CALL, _LLM, returns="None"),
    Surface(
        "tensorrt_llm",
        "LLM.get_stats",
        Kind.CALL,
        _LLM,
        (Parameter("timeout", "float | None", 2),),
        returns="list[dict[str, Any]]",
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "TorchLlmArgs",
        Kind.MODEL,
        _ARGS,
        (
            *_CONSTRUCTOR,
            Parameter("backend", "str | None", None),
            *_optional("pipeline_parallel_size", "context_parallel_size", annotation="int", default=1),
            *_optional("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"),
            _must("max_batch_size", "int | None", 2048),
            _must("max_num_tokens", "int | None", 8192),
            _must("max_seq_len", "int | None", None),
            Parameter("max_input_len", "int | None", 1024),
            _must("max_beam_width", "int | None", 1),
            _must("enable_chunked_prefill", "bool", False),
            _must("kv_cache_config", "KvCacheConfig", None),
            _must("stream_interval", "int", 1),
            *_optional("batched_logits_processor", "speculative_config", "guided_decoding_backend"),
            *_optional("enable_lora", annotation="bool", default=False),
            *_optional("lora_config"),
            Parameter("load_format", "Any", "auto"),
            _must("cuda_graph_config", "CudaGraphConfig | None", None),
            _must("disable_overlap_scheduler", "bool", False),
            Parameter("attn_backend", "str", "TRTLLM"),
            _must("sampler_type", "str", "auto"),
            *_optional("attention_dp_config", "moe_config"),
            *_optional("enable_attention_dp", annotation="bool", default=False),
            Parameter("allreduce_strategy", "str", "AUTO"),
            Parameter("gpus_per_node", "int | None", None),
            Parameter("print_iter_log", "bool", False),
            Parameter("garbage_collection_gen0_threshold", "int", 20000),
            _must("scheduler_config", "SchedulerConfig", None),
            Parameter("batch_wait_timeout_ms", "float", 0),
            Parameter("batch_wait_timeout_iters", "int", 0),
            Parameter("batch_wait_max_tokens_ratio", "float", 0),
            *_optional(
                "enable_iter_perf_stats",
                "enable_iter_req_stats",
                "return_perf_metrics",
                "gather_generation_logits",
                annotation="bool",
                default=False,
            ),
            Parameter("perf_metrics_max_requests", "int", 0),
            Parameter("iter_stats_max_iterations", "int | None", None),
            _must("torch_compile_config", "TorchCompileConfig | None", None),
            Parameter("num_postprocess_workers", "int", 0),
            *_optional(
                "postprocess_tokenizer_dir",
                "kv_connector_config",
                "checkpoint_loader",
                "checkpoint_format",
                "orchestrator_type",
            ),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "KvCacheConfig",
        Kind.MODEL,
        _ARGS,
        (
            _must("enable_block_reuse", "bool", True),
            _must("max_tokens", "int | None", None),
            *_optional("max_attention_window", "sink_token_length"),
            _must("free_gpu_memory_fraction", "float | None", 0.9),
            _must("host_cache_size", "int | None", None),
            Parameter("onboard_blocks", "bool", True),
            Parameter("cross_kv_cache_fraction", "float | None", None),
            Parameter("secondary_offload_min_priority", "int | None", 35),
            Parameter("event_buffer_max_size", "int", 0),
            Parameter("attention_dp_events_gather_period_ms", "int", 5),
            _must("enable_partial_reuse", "bool", True),
            _must("copy_on_partial_reuse", "bool", True),
            Parameter("use_uvm", "bool", False),
            Parameter("max_gpu_total_bytes", "int", 0),
            Parameter("dtype", "str", "auto"),
            Parameter("mamba_ssm_cache_dtype", "str", "auto"),
            _must("tokens_per_block", "int", 32),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "SchedulerConfig",
        Kind.MODEL,
        _ARGS,
        (
            _must("capacity_scheduler_policy", "CapacitySchedulerPolicy", "GUARANTEED_NO_EVICT"),
            *_optional("context_chunking_policy", "dynamic_batch_config"),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "CapacitySchedulerPolicy",
        Kind.ENUM,
        _ARGS,
        (
            Parameter("MAX_UTILIZATION", "str", "MAX_UTILIZATION"),
            _must("GUARANTEED_NO_EVICT", "str", "GUARANTEED_NO_EVICT"),
            Parameter("STATIC_BATCH", "str", "STATIC_BATCH"),
        ),
        base="str, Enum",
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "CudaGraphConfig",
        Kind.MODEL,
        _ARGS,
        (
            _must("batch_sizes", "list[int] | None", None),
            _must("max_batch_size", "int", 0),
            _must("enable_padding", "bool", False),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "TorchCompileConfig",
        Kind.MODEL,
        _ARGS,
        (
            Parameter("enable_fullgraph", "bool", True),
            Parameter("enable_inductor", "bool", False),
            _must("enable_piecewise_cuda_graph", "bool", False),
            _must("capture_num_tokens", "list[int] | None", None),
            Parameter("enable_userbuffers", "bool", True),
            Parameter("max_num_streams", "int", 1),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "KvCacheRetentionConfig",
        Kind.CONSTRUCTOR,
        _RETENTION,
        (
            _must("token_range_retention_configs", "list[KvCacheRetentionConfig.TokenRangeRetentionConfig]"),
            _must("decode_retention_priority", "int", 35),
            Parameter("decode_duration_ms", "timedelta | None", None),
            *_optional("transfer_mode", "directory"),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "KvCacheRetentionConfig.TokenRangeRetentionConfig",
        Kind.CONSTRUCTOR,
        _RETENTION,
        (
            _must("token_start", "int"),
            _must("token_end", "int | None"),
            _must("priority", "int"),
            Parameter("duration_ms", "timedelta | None", None),
        ),
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "DisaggregatedParams",
        Kind.DATACLASS,
        "tensorrt_llm/disaggregated_params.py",
        (
            *_optional("request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens"),
            Parameter("disagg_request_id", "int | None", None, unsure=True),
        ),
        essential=False,
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "RequestOutput",
        Kind.RESULT,
        _RESULT,
        (
            _must("request_id", "int"),
            Parameter("prompt", "str | None"),
            Parameter("prompt_token_ids", "list[int]"),
            _must("outputs", "list[CompletionOutput]"),
            Parameter("context_logits", "Tensor | None"),
            _must("finished", "bool"),
            _must("cached_tokens", "int"),
            Parameter("decoding_iter", "int"),
            Parameter("avg_decoded_tokens_per_iter", "float | None"),
        ),
    ),
    Surface("tensorrt_llm.llmapi", "RequestOutput.__aiter__", Kind.CALL, _RESULT, returns="RequestOutput"),
    Surface("tensorrt_llm.llmapi", "RequestOutput.__anext__", Kind.COROUTINE, _RESULT, returns="RequestOutput"),
    Surface("tensorrt_llm.llmapi", "RequestOutput.aresult", Kind.COROUTINE, _RESULT, returns="RequestOutput"),
    Surface("tensorrt_llm.llmapi", "RequestOutput.abort", Kind.CALL, _RESULT),
    Surface("tensorrt_llm.llmapi", "RequestOutput.aborted", Kind.CALL, _RESULT, returns="bool"),
    Surface(
        "tensorrt_llm.llmapi",
        "RequestOutput.result",
        Kind.CALL,
        _RESULT,
        (Parameter("timeout", "float | None", None),),
        returns="RequestOutput",
    ),
    Surface(
        "tensorrt_llm.llmapi",
        "CompletionOutput",
        Kind.RESULT,
        _RESULT,
        (
            Parameter("index", "int"),
            Parameter("text", "str"),
            _must("token_ids", "list[int]"),
            Parameter("cumulative_logprob", "float | None"),
            Parameter("logprobs", "list[dict[int, Logprob]]"),
            Parameter("prompt_logprobs", "list[dict[int, Logprob]] | None"),
            _must("finish_reason", "str | None"),
            _must("stop_reason", "int | str | None"),
            Parameter("generation_logits", "Tensor | None"),
            Parameter("additional_context_outputs", "dict[str, Tensor] | None"),
            Parameter("additional_generation_outputs", "dict[str, Tensor] | None"),
            Parameter("disaggregated_params", "DisaggregatedParams | None"),
            Parameter("request_perf_metrics", "Any"),
            Parameter("length", "int"),
            Parameter("text_diff", "str"),
            Parameter("token_ids_diff", "list[int]"),
            Parameter("logprobs_diff", "list[dict[int, Logprob]]"),
        ),
    ),
    Surface(
        "tensorrt_llm.executor.utils",
        "RequestError",
        Kind.CLASS,
        "tensorrt_llm/executor/utils.py",
        base="RuntimeError",
        essential=False,
    ),
    Surface(
        "tensorrt_llm.executor.result",
        "Logprob",
        Kind.RESULT,
        _RESULT,
        (Parameter("logprob", "float"), Parameter("rank", "int | None")),
    ),
    Surface(
        "tensorrt_llm.sampling_params",
        "SamplingParams",
        Kind.DATACLASS,
        _SAMPLING,
        (
            _must("end_id", "int | None", None),
            Parameter("pad_id", "int | None", None),
            _must("max_tokens", "int", 32),
            *_optional("bad", annotation="str | list[str] | None"),
            *_optional("bad_token_ids", annotation="list[int] | None"),
            *_optional("stop", annotation="str | list[str] | None"),
            _must("stop_token_ids", "list[int] | None", None),
            Parameter("include_stop_str_in_output", "bool", False),
            *_optional("embedding_bias", annotation="Tensor | None"),
            _must("logits_processor", "LogitsProcessor | list[LogitsProcessor] | None", None),
            Parameter("apply_batched_logits_processor", "bool", False),
            Parameter("n", "int", 1),
            *_optional("best_of", annotation="int | None"),
            Parameter("use_beam_search", "bool", False),
            _must("top_k", "int | None", None),
            _must("top_p", "float | None", None),
            *_optional("top_p_min", annotation="float | None"),
            *_optional("top_p_reset_ids", annotation="int | None"),
            *_optional("top_p_decay", annotation="float | None"),
            Parameter("seed", "int | None", None),
            _must("temperature", "float | None", None),
            *_optional("min_tokens", annotation="int | None"),
            *_optional(
                "beam_search_diversity_rate",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "length_penalty",
                annotation="float | None",
            ),
            *_optional("early_stopping", "no_repeat_ngram_size", annotation="int | None"),
            *_optional("min_p", annotation="float | None"),
            *_optional("beam_width_array", annotation="list[int] | None"),
            *_optional("logprobs", "prompt_logprobs", annotation="int | None"),
            Parameter("return_context_logits", "bool", False),
            Parameter("return_generation_logits", "bool", False),
            Parameter("exclude_input_from_output", "bool", True),
            Parameter("return_encoder_output", "bool", False),
            Parameter("return_perf_metrics", "bool", False),
            *_optional("additional_model_outputs", annotation="list[str] | None"),
            *_optional("lookahead_config", "guided_decoding"),
            Parameter("ignore_eos", "bool", False),
            _must("detokenize", "bool", True),
            Parameter("add_special_tokens", "bool", True),
            *_optional("truncate_prompt_tokens", annotation="int | None"),
            Parameter("skip_special_tokens", "bool", True),
            Parameter("spaces_between_special_tokens", "bool", True),
        ),
    ),
    Surface("tensorrt_llm.sampling_params", "LogitsProcessor", Kind.CLASS, _SAMPLING, base="ABC"),
    Surface(
        "tensorrt_llm.sampling_params",
        "LogitsProcessor.__call__",
        Kind.CALL,
        _SAMPLING,
        (
            _must("req_id", "int"),
            _must("logits", "Tensor"),
            _must("token_ids", "list[list[int]]"),
            _must("stream_ptr", "int | None"),
            _must("client_id", "int | None"),
        ),
    ),
    Surface(
        "tensorrt_llm._torch.models.modeling_utils",
        "register_auto_model",
        Kind.CALL,
        _MODELING,
        (_must("name", "str"),),
        returns="Callable[[_Class], _Class]",
    ),
    Surface(
        "tensorrt_llm._torch.models.modeling_utils",
        "DecoderModelForCausalLM",
        Kind.CLASS,
        _MODELING,
        (
            _must("model", "nn.Module"),
            _must("lm_head", "nn.Module"),
            Parameter("model_config", "Any"),
            Parameter("config", "Any"),
        ),
        base="nn.Module",
    ),
    *(surface for module, name in _STOCK for surface in _stock(module, name)),
    Surface(
        "tensorrt_llm._torch.attention_backend",
        "AttentionMetadata",
        Kind.RESULT,
        "tensorrt_llm/_torch/attention_backend/interface.py",
        (
            _must("seq_lens_cuda", "Tensor"),
            Parameter("seq_lens", "Tensor"),
            Parameter("num_contexts", "int"),
            Parameter("request_ids", "list[int]"),
        ),
    ),
)

EXPORTS: Final[dict[str, tuple[str, ...]]] = {
    "tensorrt_llm": ("tensorrt_llm.sampling_params.SamplingParams",),
    "tensorrt_llm.llmapi": ("tensorrt_llm.LLM", "tensorrt_llm.sampling_params.SamplingParams"),
}
"""Second import paths of the same objects."""

IGNORED_BY_TORCH_SAMPLER: Final = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad",
    "bad_token_ids",
    "min_p",
    "seed",
)
"""Sampling parameters that the default sampler of this release accepts and does nothing with
(tensorrt_llm/_torch/pyexecutor/sampler.py; TensorRT-LLM issue 9442)."""


def surface(path: str) -> Surface:
    """The surface at a dotted path.

    Raises:
        KeyError: the table has no such path.
    """
    return _BY_PATH[path]


_BY_PATH = {entry.path: entry for entry in SURFACES}
