"""What TensorRT-LLM does and this project relies on, as data; see `facts` for names and signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenrouter.engines.tensorrt_llm.facts import WORKER_COMMAND
from tokenrouter.engines.tensorrt_llm.sources import (
    ARGS,
    ENGINE,
    EXECUTOR,
    KV,
    LLM,
    MODELING,
    PROXY,
    PYEXECUTOR,
    RESULT,
    SAMPLING,
    SCHEDULER,
)


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


_B = Behaviour
BEHAVIOURS: Final[dict[str, Behaviour]] = {
    "unknown_arguments_refused": _B("LLM(**kwargs) raises ValueError for a name that is no field", LLM),
    "needs_gpu_for_arguments": _B("TorchLlmArgs cannot be constructed by itself on a machine without a GPU", ARGS),
    "end_id_needed": _B("without a tokenizer a request without end_id is refused", LLM),
    "prompt_limit": _B("a prompt longer than max_num_tokens is refused without chunked prefill", LLM),
    "returns_at_once": _B("generate_async returns before anything was computed", LLM),
    "unknown_fields_refused": _B("SamplingParams raises TypeError for a name that is no field", SAMPLING),
    "needs_running_loop": _B("async iteration works only if an event loop ran when the request was submitted", RESULT),
    "same_object": _B("streaming yields one and the same object", RESULT),
    "cumulative": _B("token_ids grows from response to response", RESULT),
    "stop_ids_cut": _B("matched stop ids are cut off the last response", RESULT),
    "end_id_kept": _B("the end id stays in token_ids", RESULT),
    "stop_reason_only_for_stop_words": _B("stop_reason is None after the end id", RESULT),
    "end_id_first": _B(
        "the end id is tested before the length", f"{PYEXECUTOR}/sampler.py, TorchSampler._handle_stop_criteria"
    ),
    "length_before_stop_words": _B(
        "a stop id sampled as the last allowed token reports 'length' and is not cut",
        f"{PYEXECUTOR}/sampler.py, TorchSampler._handle_stop_criteria",
    ),
    "late_abort": _B(
        "abort() acts at the end of the next iteration, which may still bring a token",
        f"{EXECUTOR}, _handle_canceled_requests",
    ),
    "abort_reason": _B("an aborted request that was active ends with finish_reason 'cancelled'", RESULT),
    "queued_abort_unanswered": _B(
        "an aborted request that was not active yet is dropped without an answer",
        f"{EXECUTOR}, _handle_canceled_requests; {PYEXECUTOR}/executor_request_queue.py, update_waiting_queue",
    ),
    "in_process_not_pickled": _B(
        "with TLLM_WORKER_USE_SINGLE_PROCESS=1 a request's own processor is called, not a copy that was pickled",
        "tensorrt_llm/executor/executor.py, create",
    ),
    "five_arguments": _B("processors get five positional arguments", ENGINE),
    "no_stream_no_client": _B("the last two of them are None", ENGINE),
    "logits_shape": _B("logits are a view of shape [1, 1, V]", ENGINE),
    "logits_in_place": _B("what a processor writes into the logits counts", ENGINE),
    "history_given": _B("token_ids is [prompt + generated]", ENGINE),
    "first_token_processed": _B("processors also see the logits of the first token", ENGINE),
    "chunks_processed": _B(
        "processors also see the logits after each chunk of a long prompt, with the whole prompt", ENGINE
    ),
    "one_failure_fails_all": _B(
        "an exception in a processor fails every active request, those outside the step included",
        f"{EXECUTOR}, _forward_step and _handle_errors",
    ),
    "vocabulary_checked": _B("a prompt id outside the vocabulary fails the request", f"{EXECUTOR}, _validate_request"),
    "batched": _B("requests that are ready together share one forward pass", SCHEDULER),
    "whole_prompt_charged": _B(
        "the scheduler charges a resumed request its whole prompt: its prefix is looked up afterwards",
        f"{SCHEDULER}; {PYEXECUTOR}/resource_manager.py, KVCacheManager.prepare_resources",
    ),
    "equal_progress": _B(
        "with EQUAL_PROGRESS prompts that do not fit together get one block of tokens each in turn", SCHEDULER
    ),
    "reuse": _B("a prompt's longest stored prefix is not computed again, and cached_tokens says how long it was", KV),
    "reuse_capped": _B("at least the last prompt token is computed", KV),
    "partial_reuse": _B("without enable_partial_reuse only whole blocks are reused", KV),
    "last_token_not_stored": _B("the last token of a response is not in the cache", KV),
    "generated_stored": _B("generated tokens can be reused too", KV),
    "stored_at_the_end": _B(
        "generated tokens are stored when the request ends, those of the prompt after each chunk",
        f"{PYEXECUTOR}/resource_manager.py, KVCacheManager.update_resources and free_resources",
    ),
    "stored_before_answer": _B(
        "a request submitted after the final response finds its blocks: they are stored before the next fetch",
        f"{EXECUTOR}, _handle_responses",
    ),
    "salted": _B("only requests with the same cache_salt share blocks", KV),
    "evicts_least_recent": _B("among equals the block used longest ago goes first", KV),
    "evicts_low_priority_first": _B("retention priorities order the eviction", KV),
    "pool_capped": _B(
        "the pool holds the smaller of max_tokens and the share of the memory, without a word",
        f"{PYEXECUTOR}/_util.py, KvCacheCreator.configure_kv_cache_capacity",
    ),
    "padding_takes_a_block": _B(
        "with padded CUDA graphs one KV block belongs to the request that pads",
        f"{PYEXECUTOR}/cuda_graph_runner.py",
    ),
    "manager_in_frames": _B(
        "a processor finds the KV manager through the local `resource_manager` of its callers",
        f"{PYEXECUTOR}/model_engine.py, forward",
        unconfirmed="that the frame of `forward` is below the processor's in this release; else the setting is trusted",
    ),
    "iterations_told": _B(
        "with enable_iter_perf_stats every iteration is told, with iter, iterLatencyMS, numActiveRequests, "
        "numNewActiveRequests, and in inflightBatchingStats numContextRequests, numGenRequests and numCtxTokens, the "
        "last without what was found in the cache",
        f"{EXECUTOR}, _update_iter_stats; cpp/tensorrt_llm/executor/jsonSerialization.cpp",
    ),
    "iteration_includes_wait": _B(
        "an iteration's latency begins before the loop waits for requests", f"{EXECUTOR}, _executor_loop"
    ),
    "idle_iterations_repeat": _B(
        "an iteration that runs no step tells the numbers of the one before", f"{EXECUTOR}, _executor_loop"
    ),
    "iterations_end": _B(
        "iterating over them ends when none comes in time, and from then on at once until the next submission",
        f"{RESULT}, IterationResult",
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
        f"{PYEXECUTOR}/seq_slot_manager.py, prepare_resources",
        unconfirmed="that first_iter and iter count alike in this release",
    ),
    "model_registered": _B("a class registered for the checkpoint's architecture replaces the stock class", MODELING),
    "workers_named": _B(
        f"worker processes descend from this one, with {WORKER_COMMAND!r} in their command line",
        "tensorrt_llm/llmapi/mpi_session.py, MpiPoolSession",
        unconfirmed="that what Open MPI spawns stays a descendant of this process",
    ),
    "dead_worker_silent": _B(
        "when a worker dies, requests in flight are told nothing, and the next submission raises",
        f"{PROXY}, mpi_done_callback and _handle_background_error",
        unconfirmed="whether the future of a killed MPI process completes at all",
    ),
}
"""By the name of the switch that breaks it in the double."""
