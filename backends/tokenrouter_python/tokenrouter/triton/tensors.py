"""The tensors of the entry model and of a subserver that is called directly.

Names, types and shapes are those of NVIDIA's `tensorrt_llm_bls`, so that existing TensorRT-LLM clients and NVIDIA's
OpenAI frontend work unmodified. The tables below are the contract; the committed config.pbtxt files declare exactly
these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenrouter.errors import InvalidRequest
from tokenrouter.request import Defaults, Limits, RequestFields
from tokenrouter.timeline.recording import MOST_MS, PARAMETER


@dataclass(frozen=True, slots=True)
class Input:
    """One declared input tensor.

    Attributes:
        type: Triton data type without TYPE_.
        dims: dimensions without the batch dimension.
        field: attribute of `CallFields` or `RequestFields` it sets, or "" if only `harmless` values are accepted.
        harmless: values that ask for nothing and are accepted without a field; None accepts any.
    """

    type: str
    dims: tuple[int, ...] = (1,)
    field: str = ""
    harmless: tuple[Any, ...] | None = ()


# More values than this have no business in a tensor that is not supported.
_MANY = 1024
_SLICE = 1 << 15
_LONGEST_PARAMETERS = 1 << 16
_LONGEST_NAME = 64

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


@dataclass(frozen=True, slots=True)
class CallFields:
    """What a client asked about the form of the answer."""

    exclude_input_in_output: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_routing: bool = False
    stop: bool = False


_WORD_IDS = (2, -1)
_DEFAULTS = Defaults()
_PROMPTS = ("text_input", "input_ids")
# What NVIDIA's inflight_batcher_llm_client.py sends beside the tensor `streaming`.
_IGNORED_PARAMETERS = ("Streaming",)
_TRACE_HEADERS = ("traceparent", "tracestate")
_CALL_FIELDS = frozenset(field.name for field in fields(CallFields))


def read_inputs(
    tensors: Mapping[str, npt.NDArray[Any]], table: Mapping[str, Input], limits: Limits, defaults: Defaults = _DEFAULTS
) -> tuple[RequestFields, CallFields]:
    """The fields of one request.

    Args:
        tensors: arrays by name, with the batch dimension.
        table: what the model declares.
        limits: see `check_sizes`.
        defaults: of what is not sent.

    Raises:
        InvalidRequest: names the tensor, its value and the allowed form.
    """
    _check_one_prompt(tensors)
    check_sizes(tensors, table, limits)
    request: dict[str, Any] = {}
    call: dict[str, Any] = {}
    for name, array in tensors.items():
        declared = table[name]
        values = _row(name, array)
        if not declared.field:
            _refuse_unless_harmless(name, declared, values)
            continue
        target = call if declared.field in _CALL_FIELDS else request
        value = values if -1 in declared.dims else _one(name, values)
        if declared.dims == _WORD_IDS:
            value = read_word_ids(name, values)
        # NaN differs from itself, so a name that comes alone is not compared.
        if declared.field in target and target[declared.field] != value:
            raise InvalidRequest(
                f"{name} is {value!r}, but another name of {declared.field} says {target[declared.field]!r}"
            )
        target[declared.field] = value
    call.setdefault("exclude_input_in_output", defaults.exclude_input_in_output)
    return RequestFields(**request), CallFields(**call)


def size_of(tensors: Mapping[str, npt.NDArray[Any]]) -> int:
    """Bytes of all tensors; of texts at least 16 each."""
    return sum([_size(array) for array in tensors.values()])


def _size(array: npt.NDArray[Any]) -> int:
    if array.dtype != np.object_ or array.size > _MANY:
        return 16 * array.size if array.dtype == np.object_ else array.nbytes
    return sum([max(16, len(value)) for value in array.reshape(-1)])


def check_sizes(tensors: Mapping[str, npt.NDArray[Any]], table: Mapping[str, Input], limits: Limits) -> None:
    """Refuses what is too much by its count or bytes, before any of it is read.

    Raises:
        InvalidRequest: names the tensor, its size and the limit.
    """
    for name, array in tensors.items():
        declared = table[name]
        limits.check_count(declared.field, array.size)
        if array.size > 1 and -1 not in declared.dims and array.shape[0] == 1:
            raise InvalidRequest(f"{name} has {array.size} values; send exactly one")
        if not declared.field and array.size > _MANY:
            raise InvalidRequest(f"{name} is not supported (got {array.size} values): leave it out")
        if array.dtype == np.object_:
            for i, value in enumerate(array.reshape(-1)):
                where = declared.field or name
                limits.check_bytes(f"{where}[{i}]" if -1 in declared.dims else where, len(value))


@dataclass(frozen=True, slots=True)
class CallParameters:
    """What a client says beside tensors.

    Attributes:
        timeout_us: of the request, in microseconds, or 0.
        timeline_ms: asks for a recording of so many milliseconds instead of tokens; None: does not.
        return_error_code: the text of an error is to begin with Triton's code.
        traceparent, tracestate: headers of W3C's Trace Context, as Triton forwards them; whether they are well formed
            is not known here.
    """

    timeout_us: int = 0
    timeline_ms: int | None = None
    return_error_code: bool = False
    traceparent: str = ""
    tracestate: str = ""


def read_parameters(parameters: str, table: Mapping[str, Input]) -> CallParameters:
    """The custom request parameters that are known; all others are refused.

    Triton makes one of every JSON key of /generate that names no tensor. The `timeout` that its other endpoints know is
    not among them.

    Args:
        parameters: JSON object as Triton gives it.
        table: what the model declares.

    Raises:
        InvalidRequest: names the parameter and what it may have been meant for.
    """
    if len(parameters or "") > _LONGEST_PARAMETERS:
        raise InvalidRequest(f"unknown fields of {len(parameters)} bytes; leave out all but these: {', '.join(table)}")
    given = json.loads(parameters or "{}")
    timeout, timeline = given.pop("timeout", 0), given.pop(PARAMETER, None)
    coded = given.pop("return_error_code", False) is True
    trace = {name: given.pop(name) for name in list(given) if name.lower() in _TRACE_HEADERS}
    for name in given:
        if not name.startswith("triton_") and name not in _IGNORED_PARAMETERS:
            name = name[:_LONGEST_NAME]
            close = get_close_matches(name, table, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(table)}"
            raise InvalidRequest(f"unknown field {name!r}; {hint}")
    if type(timeout) is not int or timeout < 0:
        raise InvalidRequest(f"timeout is {timeout!r}; send microseconds, a whole number of at least 0")
    if timeline is not None and (type(timeline) is not int or not 1 <= timeline <= MOST_MS):
        raise InvalidRequest(f"{PARAMETER} is {timeline!r}; send milliseconds, a whole number in 1..{MOST_MS}")
    return CallParameters(timeout, timeline, coded, **{name.lower(): str(value) for name, value in trace.items()})


def read_word_ids(name: str, values: Sequence[int]) -> list[list[int]]:
    """The words of NVIDIA's `bad_words_list` and `stop_words_list`: [2, n], ids above, the end of every word below.

    Raises:
        InvalidRequest: an end lies before its word's beginning or behind the ids, or an id is negative.
    """
    ids, ends = values[: len(values) // 2], values[len(values) // 2 :]
    words: list[list[int]] = []
    begin = 0
    for end in ends:
        if end == -1:
            break
        word = list(ids[begin:end])
        if not begin < end <= len(ids) or min(word) < 0:
            raise InvalidRequest(
                f"{name} ends a word at {end} that begins at {begin}, or has a negative id; send ids [2, n], all words "
                "in a row, and below them where each ends, then -1"
            )
        words.append(word)
        begin = end
    return words


def word_ids(words: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """[2, n] int32: what `read_word_ids` reads."""
    ids = [token for word in words for token in word] or [0]
    ends = [int(end) for end in np.cumsum([len(word) for word in words])]
    return np.array([ids, [*ends, *[-1] * (len(ids) - len(ends))]], dtype=np.int32)


def _check_one_prompt(tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Every tensor of a batch has as many rows; the one that is named is the prompt."""
    for name in (*_PROMPTS, *tensors):
        array = tensors.get(name)
        if array is not None and array.ndim > 1 and array.shape[0] != 1:
            raise InvalidRequest(f"one prompt per request: {name} has {array.shape[0]} rows; send a request for each")


def _row(name: str, array: npt.NDArray[Any]) -> list[Any]:
    """All values of the only row."""
    values: list[Any] = []
    flat = array.reshape(-1)
    for start in range(0, flat.size, _SLICE):
        # Not all at once, since other threads wait as long as one conversion takes.
        values += flat[start : start + _SLICE].tolist()
    return [text(name, value) for value in values] if array.dtype == np.object_ else values


def text(name: str, value: Any) -> str:
    """An element of a STRING tensor. Raises InvalidRequest if it is no UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"{name} is not valid UTF-8: {exc.reason} at byte {exc.start}; send UTF-8 text") from exc


def _one(name: str, values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise InvalidRequest(f"{name} has {len(values)} values; send exactly one")
    return values[0]


def _refuse_unless_harmless(name: str, declared: Input, values: Sequence[Any]) -> None:
    if declared.harmless is None:
        return
    for value in values:
        if value not in declared.harmless:
            allowed = " or ".join(repr(value) for value in declared.harmless)
            remedy = f"leave it out or send {allowed}" if allowed else "leave it out"
            raise InvalidRequest(f"{name} is not supported (got {value!r}): {remedy}")
