"""What a client sends: the values of tensors by the tables of `tensors`, and parameters of the request beside them."""

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
from tokenrouter.triton.tensors import Input


@dataclass(frozen=True, slots=True)
class CallFields:
    """What a client asked about the form of the answer."""

    exclude_input_in_output: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_routing: bool = False
    stop: bool = False


# More values than this have no business in a tensor that is not supported.
_MANY = 1024
_SLICE = 1 << 15
_LONGEST_PARAMETERS = 1 << 16
_LONGEST_NAME = 64
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
