"""Switches that break one behaviour of this double each, to see whether a test notices.

True is how TensorRT-LLM behaves. `FAKE_TENSORRT_LLM_BREAK=name,name` in the environment breaks some from the start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SWITCHES: dict[str, str] = {
    "unknown_arguments_refused": "LLM(**kwargs) raises ValueError for a name that is no field",
    "returns_at_once": "generate_async returns before anything was computed",
    "needs_running_loop": "async iteration works only if an event loop ran when the request was submitted",
    "same_object": "streaming yields one and the same object",
    "cumulative": "token_ids grows; the new tokens are in token_ids_diff",
    "stop_ids_cut": "matched stop ids are cut off the last response",
    "end_id_kept": "the end id stays in token_ids",
    "stop_reason_only_for_stop_words": "stop_reason is None after the end id",
    "end_id_first": "the end id is tested before the length",
    "length_before_stop_words": "a stop id sampled as the last allowed token reports 'length' and is not cut",
    "late_abort": "abort() acts at the end of the next iteration, which may still bring a token",
    "abort_reason": "an aborted request ends with finish_reason 'cancelled'",
    "processors_pickled": "processors are pickled and unpickled before use",
    "five_arguments": "processors get five positional arguments",
    "no_stream_no_client": "the last two of them are None",
    "logits_shape": "logits are a view of shape [1, 1, V]",
    "logits_in_place": "what a processor writes into the logits counts",
    "history_given": "token_ids is [prompt + generated]",
    "history_lags": "with the overlap scheduler token_ids lags one token",
    "surplus_step": "with the overlap scheduler one more step runs after a stop",
    "processor_list": "a list of processors is applied in order",
    "first_token_processed": "processors also see the logits of the first token",
    "chunks_processed": "processors also see the logits after each chunk of a long prompt, with the whole prompt",
    "one_failure_fails_all": "an exception in a processor fails every request of the step",
    "unknown_fields_refused": "SamplingParams raises TypeError for a name that is no field",
    "end_id_needed": "without a tokenizer a request without end_id is refused",
    "strings_ignored": "stop and bad strings are not tokenised once end_id is set: the request is refused",
    "reuse": "the prompt's longest stored prefix is not computed again, and cached_tokens tells how long it was",
    "reuse_capped": "at least the last prompt token is computed",
    "partial_reuse": "without enable_partial_reuse only whole blocks are reused",
    "last_token_not_stored": "the last token of a response is not in the cache",
    "generated_stored": "generated tokens can be reused too",
    "salted": "only requests with the same cache_salt share blocks",
    "evicts_least_recent": "among equals the block used longest ago goes first",
    "evicts_low_priority_first": "retention priorities order the eviction",
    "stored_before_answer": "a request submitted after the final response finds its blocks",
    "ignores_penalties": "the default sampler ignores repetition, presence and frequency penalties",
    "ignores_bad_words": "the default sampler ignores bad words",
    "ignores_min_p": "the default sampler ignores min_p",
    "ignores_seed": "the default sampler ignores seeds",
    "prompt_limit": "a prompt longer than max_num_tokens is refused without chunked prefill",
    "vocabulary_checked": "a prompt id outside the vocabulary fails the request",
    "model_registered": "a class registered for the checkpoint's architecture replaces the stock class",
    "additional_outputs": "named tensors of the model's output come back",
    "batched": "requests that are ready together share one forward pass",
    "needs_gpu_for_arguments": "TorchLlmArgs cannot be constructed by itself on a machine without a GPU",
}

_broken: set[str] = set()


def true(name: str) -> bool:
    """Whether the behaviour is as in TensorRT-LLM."""
    assert name in SWITCHES, name
    return name not in _broken


def broken_now() -> set[str]:
    """Names of the broken behaviours."""
    return set(_broken)


def break_for_good(names: set[str]) -> None:
    """Breaks behaviours for the rest of this process."""
    _check(names)
    _broken.update(names)


@contextmanager
def broken(*names: str) -> Iterator[None]:
    """Breaks behaviours for a while."""
    _check(set(names))
    before = set(_broken)
    _broken.update(names)
    try:
        yield
    finally:
        _broken.clear()
        _broken.update(before)


def _check(names: set[str]) -> None:
    unknown = names - set(SWITCHES)
    if unknown:
        raise KeyError(f"no such behaviour: {', '.join(sorted(unknown))}")


break_for_good({name for name in os.environ.get("FAKE_TENSORRT_LLM_BREAK", "").split(",") if name})
