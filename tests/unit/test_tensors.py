from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenrouter.errors import InvalidRequest
from tokenrouter.repository import Repository
from tokenrouter.request import Defaults, Limits, RequestFields
from tokenrouter.triton.inputs import CallFields, read_inputs, read_parameters, size_of
from tokenrouter.triton.tensors import ENTRY_INPUTS, ENTRY_OUTPUTS, SUBSERVER_INPUTS, SUBSERVER_OUTPUTS, Input

REPOSITORY = Path(__file__).parents[2] / "model_repository"
NUMPY = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_}


def array(tensor: Input, *values: Any) -> np.ndarray:
    """One row of a tensor as Triton hands it over."""
    if tensor.type == "STRING":
        return np.array([[value.encode() if isinstance(value, str) else value for value in values]], dtype=np.object_)
    return np.array([values], dtype=NUMPY.get(tensor.type, np.uint8))


def read(**tensors: Any) -> tuple[RequestFields, CallFields]:
    arrays = {}
    for name, values in tensors.items():
        values = values if isinstance(values, list) else [values]
        arrays[name] = array(ENTRY_INPUTS[name], *values)
    return read_inputs(arrays, ENTRY_INPUTS, Limits())


def test_every_supported_tensor_sets_its_field() -> None:
    request, call = read(
        text_input="hé",
        add_special_tokens=False,
        max_tokens=5,
        min_tokens=2,
        bad_words=["a", "b"],
        stop_words=["c"],
        end_id=3,
        top_k=4,
        top_p=0.5,
        temperature=0.25,
        repetition_penalty=1.5,
        presence_penalty=2.0,
        frequency_penalty=-1.0,
        seed=2**64 - 1,
        return_log_probs=True,
        stream=True,
        policy="random",
        policy_params="{}",
        exclude_input_in_output=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_routing=True,
    )
    assert request == RequestFields(
        text_input="hé",
        add_special_tokens=False,
        max_tokens=5,
        min_tokens=2,
        bad_words=["a", "b"],
        stop_words=["c"],
        end_id=3,
        top_k=4,
        top_p=0.5,
        temperature=0.25,
        repetition_penalty=1.5,
        presence_penalty=2.0,
        frequency_penalty=-1.0,
        seed=2**64 - 1,
        return_log_probs=True,
        stream=True,
        policy="random",
        policy_params="{}",
    )
    assert call == CallFields(True, True, True, True, True)


def test_what_is_not_sent_is_not_set() -> None:
    assert read() == (RequestFields(), CallFields())


def test_token_ids_are_a_list_of_any_length() -> None:
    assert read(input_ids=[1, 2, 3])[0].input_ids == [1, 2, 3]
    assert read_inputs({"input_ids": np.zeros((1, 0), np.int32)}, ENTRY_INPUTS, Limits())[0].input_ids == []


def test_the_old_name_of_min_tokens_works() -> None:
    assert read(min_length=3)[0].min_tokens == 3


def test_the_old_name_of_the_seed_works() -> None:
    assert read(random_seed=7)[0].seed == 7


def test_what_is_not_sent_follows_the_deployments_defaults() -> None:
    excluded = Defaults(exclude_input_in_output=True)
    assert read_inputs({}, ENTRY_INPUTS, Limits(), excluded)[1].exclude_input_in_output
    asked = {"exclude_input_in_output": np.array([[False]])}
    assert not read_inputs(asked, ENTRY_INPUTS, Limits(), excluded)[1].exclude_input_in_output


@pytest.mark.parametrize(
    ("parameters", "timeout_us"),
    [("", 0), ("{}", 0), ('{"timeout": 5000}', 5000), ('{"Streaming": false, "triton_enable_empty": true}', 0)],
)
def test_request_parameters_that_are_known(parameters: str, timeout_us: int) -> None:
    assert read_parameters(parameters, ENTRY_INPUTS).timeout_us == timeout_us


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ('{"temprature": 1.0}', "unknown field 'temprature'; did you mean temperature"),
        ('{"timeout": -1}', "timeout is -1; send microseconds"),
        ('{"timeout": 0.5}', "timeout is 0.5; send microseconds"),
        ('{"timeout": true}', "timeout is True; send microseconds"),
        ('{"timeout": "5"}', "timeout is '5'; send microseconds"),
    ],
)
def test_request_parameters_that_are_refused(parameters: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_parameters(parameters, ENTRY_INPUTS)


def test_two_names_of_one_setting_must_agree() -> None:
    assert read(min_length=3, min_tokens=3)[0].min_tokens == 3
    for first, second in [("min_length", "min_tokens"), ("min_tokens", "min_length")]:
        with pytest.raises(InvalidRequest, match="min_tokens"):
            read(**{first: 3, second: 4})


@pytest.mark.parametrize("name", [name for name, tensor in ENTRY_INPUTS.items() if tensor.harmless])
def test_unsupported_tensors_are_accepted_if_they_ask_for_nothing(name: str) -> None:
    for value in ENTRY_INPUTS[name].harmless or ():
        assert read(**{name: value}) == (RequestFields(), CallFields())


@pytest.mark.parametrize(
    "name", [name for name, tensor in ENTRY_INPUTS.items() if not tensor.field and tensor.harmless is not None]
)
def test_unsupported_tensors_are_refused_by_name_if_they_ask_for_something(name: str) -> None:
    value = {"STRING": "x", "BOOL": True}.get(ENTRY_INPUTS[name].type, 7)
    with pytest.raises(InvalidRequest, match=f"{name} is not supported .got {value!r}"):
        read(**{name: value})


def test_a_padding_id_is_accepted_whatever_it_is() -> None:
    assert read(pad_id=123) == (RequestFields(), CallFields())


@pytest.mark.parametrize("name", ["text_input", "max_tokens", "input_ids", "beam_width"])
def test_several_rows_are_refused_with_the_remedy(name: str) -> None:
    rows = np.repeat(array(ENTRY_INPUTS[name], "a" if name == "text_input" else 1), 4, axis=0)
    with pytest.raises(InvalidRequest, match=f"one prompt per request: {name} has 4 rows"):
        read_inputs({name: rows}, ENTRY_INPUTS, Limits())


@pytest.mark.parametrize("prompt", ["text_input", "input_ids"])
def test_of_a_batch_the_prompt_is_named(prompt: str) -> None:
    value = "a" if prompt == "text_input" else 1
    batch = {name: np.repeat(array(ENTRY_INPUTS[name], 1), 2, axis=0) for name in ("beam_width", "max_tokens")}
    batch[prompt] = np.repeat(array(ENTRY_INPUTS[prompt], value), 2, axis=0)
    with pytest.raises(InvalidRequest, match=f"one prompt per request: {prompt} has 2 rows"):
        read_inputs(batch, ENTRY_INPUTS, Limits())


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("name", ["text_input", "max_tokens", "temperature", "stream"])
def test_a_single_value_comes_exactly_once(name: str, count: int) -> None:
    value = "a" if name == "text_input" else 1
    with pytest.raises(InvalidRequest, match=f"{name} has {count} values; send exactly one"):
        read_inputs({name: array(ENTRY_INPUTS[name], *[value] * count)}, ENTRY_INPUTS, Limits())


@pytest.mark.parametrize("name", ["text_input", "stop_words", "policy", "image_url_input"])
def test_text_that_is_no_utf8_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is not valid UTF-8: .* at byte 1"):
        read(**{name: b"a\xff"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5])
def test_a_length_penalty_without_beams_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="length_penalty"):
        read(length_penalty=value)


def test_every_field_of_a_request_has_a_tensor_and_the_other_way_round() -> None:
    fields = {tensor.field for tensor in ENTRY_INPUTS.values() if tensor.field}
    assert fields == set(RequestFields.__dataclass_fields__) | set(CallFields.__dataclass_fields__)


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        pytest.param("tokenrouter", ENTRY_INPUTS, ENTRY_OUTPUTS, id="entry"),
        pytest.param("small", SUBSERVER_INPUTS, SUBSERVER_OUTPUTS, id="small"),
        pytest.param("large", SUBSERVER_INPUTS, SUBSERVER_OUTPUTS, id="large"),
    ],
)
def test_the_committed_repository_declares_exactly_the_tables(model: str, inputs: Any, outputs: Any) -> None:
    config = Repository(REPOSITORY).config(model)
    declared = {i["name"]: (i["data_type"], tuple(map(int, i["dims"]))) for i in config["input"]}
    assert declared == {name: (f"TYPE_{tensor.type}", tensor.dims) for name, tensor in inputs.items()}
    assert all(i.get("optional") for i in config["input"])
    given = {o["name"]: (o["data_type"], tuple(map(int, o["dims"]))) for o in config["output"]}
    assert given == {name: (f"TYPE_{kind}", dims) for name, (kind, dims) in outputs.items()}
    assert config["model_transaction_policy"] == {"decoupled": True}


# --- too much of something --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        pytest.param({"policy": "x" * 5000}, r"policy has 5000 bytes; this deployment takes at most 1024", id="policy"),
        pytest.param({"bad_words": ["a", "b" * 2000]}, r"bad_words\[1\] has 2000 bytes", id="second-word"),
        pytest.param({"text_input": "\xe9" * (1 << 20)}, "text_input has 2097152 bytes", id="bytes-not-characters"),
        pytest.param({"embedding_bias_weights": [0.0] * 5000}, "not supported .got 5000 values.", id="many-floats"),
        pytest.param({"image_url_input": ["u" * 5000]}, r"image_url_input\[0\] has 5000 bytes", id="unsupported-text"),
        pytest.param({"max_tokens": [1] * 3}, "max_tokens has 3 values; send exactly one", id="scalar"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_read(tensors: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read(**tensors)


def test_the_size_of_a_request_is_that_of_its_data() -> None:
    arrays = {"input_ids": np.zeros((1, 1000), np.int32), "text_input": np.array([[b"x" * 500]], dtype=np.object_)}
    assert size_of(arrays) == 4500
    assert size_of({"stop_words": np.array([[b"x"] * 100_000], dtype=np.object_)}) >= 100_000


def test_many_unknown_fields_and_long_names_are_refused_briefly() -> None:
    with pytest.raises(InvalidRequest, match="unknown fields of 100000 bytes"):
        read_parameters(" " * 100_000, ENTRY_INPUTS)
    with pytest.raises(InvalidRequest, match="unknown field") as caught:
        read_parameters(json.dumps({"x" * 50_000: 1}), ENTRY_INPUTS)
    assert len(str(caught.value)) < 2000
