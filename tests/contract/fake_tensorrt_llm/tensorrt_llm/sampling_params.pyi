"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

class SamplingParams:
    end_id: int | None
    pad_id: int | None
    max_tokens: int
    bad: str | list[str] | None
    bad_token_ids: list[int] | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    embedding_bias: Tensor | None
    logits_processor: LogitsProcessor | list[LogitsProcessor] | None
    apply_batched_logits_processor: bool
    n: int
    best_of: int | None
    use_beam_search: bool
    top_k: int | None
    top_p: float | None
    top_p_min: float | None
    top_p_reset_ids: int | None
    top_p_decay: float | None
    seed: int | None
    temperature: float | None
    min_tokens: int | None
    beam_search_diversity_rate: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    length_penalty: float | None
    early_stopping: int | None
    no_repeat_ngram_size: int | None
    min_p: float | None
    beam_width_array: list[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    return_context_logits: bool
    return_generation_logits: bool
    exclude_input_from_output: bool
    return_encoder_output: bool
    return_perf_metrics: bool
    additional_model_outputs: list[str] | None
    lookahead_config: Any
    guided_decoding: Any
    ignore_eos: bool
    detokenize: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    def __init__(
        self,
        *,
        end_id: int | None = ...,
        pad_id: int | None = ...,
        max_tokens: int = ...,
        bad: str | list[str] | None = ...,
        bad_token_ids: list[int] | None = ...,
        stop: str | list[str] | None = ...,
        stop_token_ids: list[int] | None = ...,
        include_stop_str_in_output: bool = ...,
        embedding_bias: Tensor | None = ...,
        logits_processor: LogitsProcessor | list[LogitsProcessor] | None = ...,
        apply_batched_logits_processor: bool = ...,
        n: int = ...,
        best_of: int | None = ...,
        use_beam_search: bool = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        top_p_min: float | None = ...,
        top_p_reset_ids: int | None = ...,
        top_p_decay: float | None = ...,
        seed: int | None = ...,
        temperature: float | None = ...,
        min_tokens: int | None = ...,
        beam_search_diversity_rate: float | None = ...,
        repetition_penalty: float | None = ...,
        presence_penalty: float | None = ...,
        frequency_penalty: float | None = ...,
        length_penalty: float | None = ...,
        early_stopping: int | None = ...,
        no_repeat_ngram_size: int | None = ...,
        min_p: float | None = ...,
        beam_width_array: list[int] | None = ...,
        logprobs: int | None = ...,
        prompt_logprobs: int | None = ...,
        return_context_logits: bool = ...,
        return_generation_logits: bool = ...,
        exclude_input_from_output: bool = ...,
        return_encoder_output: bool = ...,
        return_perf_metrics: bool = ...,
        additional_model_outputs: list[str] | None = ...,
        lookahead_config: Any = ...,
        guided_decoding: Any = ...,
        ignore_eos: bool = ...,
        detokenize: bool = ...,
        add_special_tokens: bool = ...,
        truncate_prompt_tokens: int | None = ...,
        skip_special_tokens: bool = ...,
        spaces_between_special_tokens: bool = ...,
    ) -> None: ...

class LogitsProcessor(ABC):
    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None: ...
