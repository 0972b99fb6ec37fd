"""The tensors of the entry model and of a subserver that is called directly.

Names, types and shapes are those of NVIDIA's `tensorrt_llm_bls`, so that existing TensorRT-LLM clients and NVIDIA's
OpenAI frontend work unmodified. The tables below are the contract; the committed config.pbtxt files declare exactly
these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Input:
    """One declared input tensor.

    Attributes:
        type: Triton data type without TYPE_.
        dims: dimensions without the batch dimension.
        field: attribute of `RequestFields` or `inputs.CallFields` it sets; "" if only `harmless` values are accepted.
        harmless: values that ask for nothing and are accepted without a field; None accepts any.
    """

    type: str
    dims: tuple[int, ...] = (1,)
    field: str = ""
    harmless: tuple[Any, ...] | None = ()


_ROUTED_INPUTS: dict[str, Input] = {
    "text_input": Input("STRING", field="text_input"),
    "input_ids": Input("INT32", (-1,), field="input_ids"),
    "add_special_tokens": Input("BOOL", field="add_special_tokens"),
    "max_tokens": Input("INT32", field="max_tokens"),
    "min_tokens": Input("INT32", field="min_tokens"),
    "min_length": Input("INT32", field="min_tokens"),
    "bad_words": Input("STRING", (-1,), field="bad_words"),
    "stop_words": Input("STRING", (-1,), field="stop_words"),
    "exclude_input_in_output": Input("BOOL", field="exclude_input_in_output"),
    "end_id": Input("INT32", field="end_id"),
    "pad_id": Input("INT32", harmless=None),
    "top_k": Input("INT32", field="top_k"),
    "top_p": Input("FP32", field="top_p"),
    "temperature": Input("FP32", field="temperature"),
    "length_penalty": Input("FP32", harmless=(0.0, 1.0)),
    "repetition_penalty": Input("FP32", field="repetition_penalty"),
    "presence_penalty": Input("FP32", field="presence_penalty"),
    "frequency_penalty": Input("FP32", field="frequency_penalty"),
    "seed": Input("UINT64", field="seed"),
    "random_seed": Input("UINT64", field="seed"),
    "return_log_probs": Input("BOOL", field="return_log_probs"),
    "stream": Input("BOOL", field="stream"),
    "return_perf_metrics": Input("BOOL", field="return_perf_metrics"),
    "return_num_input_tokens": Input("BOOL", field="return_num_input_tokens"),
    "return_num_output_tokens": Input("BOOL", field="return_num_output_tokens"),
    "policy": Input("STRING", field="policy"),
    "policy_params": Input("STRING", field="policy_params"),
    "priority": Input("UINT64", field="priority"),
    "return_routing": Input("BOOL", field="return_routing"),
    "speculation": Input("BOOL", field="speculation"),
    "explain": Input("BOOL", field="explain"),
}

_REFUSED_INPUTS: dict[str, Input] = {
    "decoder_text_input": Input("STRING", harmless=("",)),
    "return_context_logits": Input("BOOL", harmless=(False,)),
    "return_generation_logits": Input("BOOL", harmless=(False,)),
    "num_return_sequences": Input("INT32", harmless=(1,)),
    "beam_width": Input("INT32", harmless=(1,)),
    "prompt_embedding_table": Input("FP16", (-1, -1)),
    "prompt_vocab_size": Input("INT32", harmless=(0,)),
    "prompt_table_extra_id": Input("UINT64"),
    "embedding_bias_words": Input("STRING", (-1,), harmless=("",)),
    "embedding_bias_weights": Input("FP32", (-1,), harmless=(0.0,)),
    "num_draft_tokens": Input("INT32", harmless=(0,)),
    "use_draft_logits": Input("BOOL", harmless=(False,)),
    "lora_task_id": Input("UINT64", harmless=(0,)),
    "lora_weights": Input("FP16", (-1, -1)),
    "lora_config": Input("INT32", (-1, 3)),
    "guided_decoding_guide_type": Input("STRING", harmless=("",)),
    "guided_decoding_guide": Input("STRING", harmless=("",)),
    "image_input": Input("FP16", (-1, -1, -1, -1)),
    "image_bytes_input": Input("UINT8", (-1, -1, -1, -1)),
    "image_url_input": Input("STRING", (-1,), harmless=("",)),
    "video_bytes_input": Input("UINT8", (-1, -1, -1, -1)),
}

_ENTRY_ONLY = ("policy", "policy_params", "priority", "return_routing", "speculation", "explain")
# Models of other shapes, which the builder writes as ensembles, map their tensors onto these where the type differs or
# the entry model has no use for it.
MAPPED_INPUTS: Mapping[str, Input] = {
    "max_tokens_uint32": Input("UINT32", field="max_tokens"),
    "top_k_uint32": Input("UINT32", field="top_k"),
    "beam_width_uint32": Input("UINT32", harmless=(1,)),
    "input_lengths": Input("INT32", field="input_length"),
    "stop": Input("BOOL", field="stop"),
    "request_output_len_uint32": Input("UINT32", harmless=(0,)),  # beside `stop`
    "stop_words_list": Input("INT32", (2, -1), field="stop_word_ids"),
    "bad_words_list": Input("INT32", (2, -1), field="bad_word_ids"),
    "decoder_input_ids": Input("INT32", (-1,), harmless=(0,)),
    "return_stop_reason": Input("BOOL", harmless=(False,)),
    "return_finish_reason": Input("BOOL", harmless=None),
}

ENTRY_INPUTS: Mapping[str, Input] = {**_ROUTED_INPUTS, **_REFUSED_INPUTS, **MAPPED_INPUTS}
SUBSERVER_INPUTS: Mapping[str, Input] = {
    name: tensor for name, tensor in _ROUTED_INPUTS.items() if name not in _ENTRY_ONLY
}

OWN_OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "text_output": ("STRING", (-1,)),
    "output_ids": ("INT32", (-1,)),
    "finish_reason": ("STRING", (1,)),
    "routing": ("STRING", (1,)),
    "cum_log_probs": ("FP32", (-1,)),
    "output_log_probs": ("FP32", (-1, -1)),
    "batch_index": ("INT32", (1,)),
    "sequence_index": ("INT32", (1,)),
    "num_input_tokens": ("INT32", (1,)),
    "num_output_tokens": ("INT32", (1,)),
    "kv_cache_alloc_new_blocks": ("INT32", (1,)),
    "kv_cache_reused_blocks": ("INT32", (1,)),
    "kv_cache_alloc_total_blocks": ("INT32", (1,)),
    "arrival_time_ns": ("INT64", (1,)),
    "first_scheduled_time_ns": ("INT64", (1,)),
    "first_token_time_ns": ("INT64", (1,)),
    "last_token_time_ns": ("INT64", (1,)),
    "acceptance_rate": ("FP32", (1,)),
    "total_accepted_draft_tokens": ("INT32", (1,)),
    "total_draft_tokens": ("INT32", (1,)),
    "context_logits": ("FP32", (-1, -1)),
    "generation_logits": ("FP32", (-1, -1, -1)),
}
# As above; made for whom they are mapped only, since a client that names no outputs gets all of the others.
MAPPED_OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "output_ids_by_beam": ("INT32", (-1, -1)),
    "sequence_length": ("INT32", (-1,)),
    "is_last": ("BOOL", (1,)),  # who asks for it gets the FINAL flag with the last response, not after it
}
ENTRY_OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {**OWN_OUTPUTS, **MAPPED_OUTPUTS}
SUBSERVER_OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    name: output
    for name, output in OWN_OUTPUTS.items()
    if name not in ("routing", "context_logits", "generation_logits")
}

PREPROCESSING_INPUTS: Mapping[str, Input] = {
    "QUERY": Input("STRING"),
    "REQUEST_OUTPUT_LEN": Input("INT32"),
    "BAD_WORDS_DICT": Input("STRING", (-1,)),
    "STOP_WORDS_DICT": Input("STRING", (-1,)),
    "END_ID": Input("INT32"),
    "PAD_ID": Input("INT32"),
}
PREPROCESSING_OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "INPUT_ID": ("INT32", (-1,)),
    "REQUEST_INPUT_LEN": ("INT32", (1,)),
    "DECODER_INPUT_ID": ("INT32", (-1,)),
    "REQUEST_DECODER_INPUT_LEN": ("INT32", (1,)),
    "BAD_WORDS_IDS": ("INT32", (2, -1)),
    "STOP_WORDS_IDS": ("INT32", (2, -1)),
    "REQUEST_OUTPUT_LEN": ("INT32", (-1,)),
    "OUT_END_ID": ("INT32", (1,)),
    "OUT_PAD_ID": ("INT32", (1,)),
}
POSTPROCESSING_INPUTS: Mapping[str, Input] = {
    "TOKENS_BATCH": Input("INT32", (-1, -1)),
    "SEQUENCE_LENGTH": Input("INT32", (-1,)),
}
POSTPROCESSING_OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {"OUTPUT": ("STRING", (-1,))}
