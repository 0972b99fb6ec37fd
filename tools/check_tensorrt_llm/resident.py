"""Probe 0 of docs/tensorrt_llm_resident.md: the names on which the design of a resident engine rests.

By inspection, without a GPU. Nothing here is used by the adapter, so what is missing breaks nothing today.
"""

from __future__ import annotations

from typing import Final

from tokenrouter.engines.tensorrt_llm.facts import Kind, Parameter, Surface

_PYEXECUTOR = "_torch.pyexecutor"
_SPECULATIVE = "_torch.speculative"


def _class(module: str, name: str, *attributes: str) -> Surface:
    return _surface(module, name, Kind.CLASS, attributes)


def _call(module: str, name: str, *parameters: str) -> Surface:
    return _surface(module, name, Kind.CALL, parameters)


def _surface(module: str, name: str, kind: Kind, names: tuple[str, ...]) -> Surface:
    source = f"tensorrt_llm/{module.replace('.', '/')}.py"
    parameters = tuple(Parameter(each) for each in names)
    return Surface(f"tensorrt_llm.{module}", name, kind, source, parameters, essential=False)


SURFACES: Final[tuple[Surface, ...]] = (
    # The executor that is opened, and its loop, which has to sleep.
    _class(
        f"{_PYEXECUTOR}.py_executor",
        "PyExecutor",
        *("model_engine", "resource_manager", "kv_cache_manager", "active_requests", "_fetch_and_enqueue_requests"),
    ),
    # A step of ours.
    _class(
        f"{_PYEXECUTOR}.model_engine",
        "PyTorchModelEngine",
        *("forward", "warmup", "enable_spec_decode", "runtime_draft_len", "max_total_draft_tokens"),
        *("cuda_graph_runner", "_prepare_tp_inputs", "_forward_step"),
    ),
    _call(
        f"{_PYEXECUTOR}.model_engine",
        "PyTorchModelEngine.forward",
        *("scheduled_requests", "resource_manager", "new_tensors_device", "gather_context_logits"),
        "cache_indirection_buffer",
    ),
    _class(f"{_PYEXECUTOR}.cuda_graph_runner", "CUDAGraphRunner", "graphs", "get_graph_key", "pad_batch"),
    _class(f"{_PYEXECUTOR}.scheduler", "ScheduledRequests", "context_requests", "generation_requests"),
    # A resident.
    _class(
        f"{_PYEXECUTOR}.llm_request",
        "LlmRequest",
        *("py_request_id", "py_seq_slot", "py_draft_tokens", "py_prompt_len", "state", "max_beam_num_tokens"),
        *("context_current_position", "context_chunk_size", "get_tokens", "get_last_tokens"),
        *("add_new_token", "set_generated_tokens"),
    ),
    # Its KV.
    _class(
        f"{_PYEXECUTOR}.resource_manager",
        "KVCacheManager",
        *("impl", "prepare_resources", "free_resources", "rewind_kv_cache", "get_kv_cache_stats"),
    ),
    _call(f"{_PYEXECUTOR}.resource_manager", "KVCacheManager.rewind_kv_cache", "request", "rewind_len"),
    _class(f"{_PYEXECUTOR}.resource_manager", "ResourceManager", "get_resource_manager", "free_resources"),
    # Several positions.
    _class("llmapi", "UserProvidedDecodingConfig", "drafter", "max_draft_len", "max_concurrency"),
    _class(f"{_SPECULATIVE}.drafter", "Drafter", "prepare_draft_tokens", "should_use_spec_decode"),
    _class(f"{_SPECULATIVE}.interface", "SpeculativeDecodingMode", "extend_ctx", "is_user_provided"),
    # The other ways: blocks held by a connector, requests parked in the library's loop.
    _class(f"{_PYEXECUTOR}.kv_cache_connector", "KvCacheConnectorScheduler", "request_finished"),
    _class(f"{_PYEXECUTOR}.kv_cache_connector", "KvCacheConnectorWorker", "get_finished"),
    _class(f"{_PYEXECUTOR}.py_executor", "AsyncTransferManager", "start_transfer", "end_transfer"),
    _class(f"{_PYEXECUTOR}.sampler", "TorchSampler", "sample_async", "update_requests", "setup_sampler_step"),
)
"""None is essential to the adapter of today."""
