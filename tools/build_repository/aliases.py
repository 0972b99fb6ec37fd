"""Models of other shapes under which the entry model can be called: which tensors they have, and what each stands for.

Sources: the config.pbtxt files of NVIDIA's `inflight_batcher_llm` and `llmapi` model repositories, without the tensors
that nothing here could serve; Triton refuses those by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenrouter.triton.tensors import ENTRY_INPUTS, MAPPED_INPUTS, OWN_OUTPUTS


@dataclass(frozen=True)
class Shape:
    """Tensors of an alias.

    Attributes:
        inputs: of the entry model, by its own name.
        outputs: likewise.
        batched: whether shapes have a batch dimension.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    batched: bool = True


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# What their older clients send to end a request, beside its id. `input_ids` is the entry model's.
_STOP = {**_same("stop", "input_lengths"), "request_output_len": "request_output_len_uint32"}
_BLS = {**_same(*(name for name in ENTRY_INPUTS if name not in MAPPED_INPUTS)), **_STOP}
_UINT32 = {"max_tokens": "max_tokens_uint32", "top_k": "top_k_uint32", "beam_width": "beam_width_uint32"}
_ROUTING = ("policy", "policy_params", "priority", "return_routing")
_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_METRICS = tuple(
    name for name in OWN_OUTPUTS if name.startswith("kv_cache") or name.endswith(("_ns", "_tokens", "rate"))
)

_LLMAPI = {
    **_same("text_input", *_ROUTING, *_COUNTS, "return_finish_reason", "return_stop_reason", "stop"),
    "streaming": "stream",
    "return_cumulative_logprob": "return_log_probs",
    "sampling_param_best_of": "num_return_sequences",
    "sampling_param_stop": "stop_words",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    **{
        f"sampling_param_{name}": name
        for name in (
            "beam_width",
            "max_tokens",
            "seed",
            "temperature",
            "top_k",
            "top_p",
            *_PENALTIES,
            "return_perf_metrics",
        )
    },
}
_CORE = {
    **_same("input_ids", "input_lengths", "decoder_input_ids", "stop_words_list", "bad_words_list", "stop", *_ROUTING),
    **_same("beam_width", "num_return_sequences", "end_id", "pad_id", "temperature", "repetition_penalty", *_PENALTIES),
    **_same("min_length", "min_tokens", "seed", "random_seed", "exclude_input_in_output", *_COUNTS),
    **_same("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics"),
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": "stream",
}

_CORE_UINT32 = {
    "request_output_len": "max_tokens_uint32",
    "runtime_top_k": "top_k_uint32",
    "beam_width": "beam_width_uint32",
}
_CORE_OUTPUTS = {
    **_same("sequence_length", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits"),
    **_same("is_last", "batch_index", "sequence_index", "finish_reason", "routing", *_METRICS),
    "output_ids": "output_ids_by_beam",
}

SHAPES: Mapping[str, Shape] = {
    "ensemble": Shape(_BLS, _same(*OWN_OUTPUTS, "is_last")),
    "ensemble_uint32": Shape({**_BLS, **_UINT32}, _same(*OWN_OUTPUTS, "is_last")),
    "tensorrt_llm_bls": Shape(_BLS, _same(*OWN_OUTPUTS)),
    "unbatched": Shape(_BLS, _same("text_output"), batched=False),
    "llmapi": Shape(
        _LLMAPI,
        {**_same("text_output", "finish_reason", "routing", *_METRICS), "cumulative_logprob": "cum_log_probs"},
        batched=False,
    ),
    "tensorrt_llm": Shape(_CORE, _CORE_OUTPUTS),
    "tensorrt_llm_uint32": Shape({**_CORE, **_CORE_UINT32}, _CORE_OUTPUTS),
}
"""By the name of NVIDIA's model. `ensemble` differs from `tensorrt_llm_bls` in where the FINAL flag stands: with the
last response, where clients made for it wait for it. Those of `_uint32` are of NVIDIA's first releases; `unbatched`
has the same fields for clients that send shapes [1] and read the first output."""

TEXT_SHAPES = ("preprocessing", "postprocessing")
"""Models of their own: they do what no tensor of the entry model gives."""
SHAPE_NAMES = (*SHAPES, *TEXT_SHAPES)
