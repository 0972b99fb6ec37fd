"""Clients that people have: those that can be installed here as they are, the others by the tensors they send.

Clients whose packages are too heavy, or clash, were tried once (docs/clients.md says how); what they send is written
down here as it was seen.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support.grpc_calls import GrpcStream
from tests.support.http_calls import answer, generate
from tests.support.repositories import END_ID, emulated_spec, write_emulated
from tests.support.waiting import metric, until, wait_idle
from tests.support.watch import WATCH
from tools.tritonserver.server import TritonServer

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning:pytriton.*")]

ONCE = {"decoupled": False}
ALIASES: dict[str, dict[str, Any]] = {
    "ensemble": {"shape": "ensemble"},
    "tensorrt_llm_bls": {},
    "ensemble_once": {"shape": "ensemble", **ONCE},
    "ensemble_old": {"shape": "ensemble_uint32"},
    "tensorrt_llm": {"shape": "tensorrt_llm", **ONCE},
    "tensorrt_llm_old": {"shape": "tensorrt_llm_uint32"},
    "preprocessing": {"shape": "preprocessing"},
    "postprocessing": {"shape": "postprocessing"},
    "llmapi": {"shape": "llmapi"},
    "llmapi_once": {"shape": "llmapi", **ONCE},
    "flat": {"shape": "unbatched", **ONCE},
}
HELLO = {"text_input": "hello", "max_tokens": 5}
FOREVER = 100_000
REQUEST_ID = itertools.count(1)
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("clients") / "repository"
    defaults = {"max_tokens": 4, "exclude_input_in_output": True}
    entry = {"unary": "once", "aliases": ALIASES, "defaults": defaults}
    options = {"step_ms": 1.0, "max_seq_len": 1 << 18, "kv_cache_config": {"max_tokens": 1 << 19}}
    write_emulated(folder, emulated_spec(entry=entry, options=options))
    with WATCH.over(TritonServer(folder, exit_timeout_s=4)) as running:
        yield running


def rows(value: Any, dtype: Any, *, flat: bool = False) -> np.ndarray:
    """A value as a tensor of shape [1, n], or [n]."""
    values = value if isinstance(value, list) else [value]
    encoded = [each.encode() if isinstance(each, str) else each for each in values]
    return np.array(encoded if flat else [encoded], dtype)


def tensors(*, flat: bool = False, integers: Any = np.int32, **fields: Any) -> Tensors:
    """Arrays of the types that clients make of Python's own."""
    kinds = {str: np.object_, bool: np.bool_, int: integers, float: np.float32}
    return {
        name: value
        if isinstance(value, np.ndarray)
        else rows(value, kinds[type(value[0] if isinstance(value, list) else value)], flat=flat)
        for name, value in fields.items()
    }


def inputs(module: Any, arrays: Tensors) -> list[Any]:
    made = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def infer(server: TritonServer, model: str, arrays: Tensors, **options: Any) -> Any:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return client.infer(model, inputs(grpcclient, arrays), **options)


def text(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


# --- one request, one response ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["once", "ensemble_once"])
def test_infer_of_tritonclient(server: TritonServer, model: str) -> None:
    arrays = tensors(**HELLO, exclude_input_in_output=False, return_num_output_tokens=True)
    results = [infer(server, model, arrays)]
    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        results.append(client.infer(model, inputs(httpclient, arrays)))

    async def awaited() -> Any:
        async with aioclient.InferenceServerClient(server.grpc_url) as client:
            return await client.infer(model, inputs(grpcclient, arrays))

    results.append(asyncio.run(awaited()))
    for result in results:
        assert text(result) == "hellohello"
        assert result.as_numpy("finish_reason").tolist() == [b"length"]
        assert result.as_numpy("num_output_tokens").tolist() == [[5]]
        # Made for models of other shapes only.
        assert result.as_numpy("output_ids_by_beam") is None
    assert answer(server, model, **HELLO, exclude_input_in_output=False)["text_output"] == "hellohello"


def test_many_at_once_do_not_wait_for_each_other(server: TritonServer) -> None:
    """Triton hands the model one request after the other; none of them holds up the next."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        done: list[str] = []

        def arrived(name: str, error: Any) -> None:
            assert error is None
            done.append(name)

        for name, length in (("long", 2000), ("short", 2)):
            arrays = tensors(text_input="x" * 10, max_tokens=length, end_id=-1)
            client.async_infer(
                "once", inputs(grpcclient, arrays), callback=lambda result, error, name=name: arrived(name, error)
            )
        until(lambda: len(done) == 2, what="both answers")
    assert done == ["short", "long"]


@pytest.mark.parametrize("url", ["http_url", "grpc_url"])
def test_clients_of_pytriton(server: TritonServer, url: str) -> None:
    where = server.http_url if url == "http_url" else f"grpc://{server.grpc_url}"
    arrays = tensors(**HELLO)
    with ModelClient(where, "once") as client:
        assert client.infer_batch(**arrays)["text_output"].tolist() == [b"hello"]
        sample = client.infer_sample(**{name: array[0] for name, array in arrays.items()})
        assert sample["text_output"] == b"hello"
    with FuturesModelClient(where, "ensemble_once") as client:
        assert client.infer_batch(**arrays).result()["text_output"].tolist() == [b"hello"]

    async def awaited() -> Any:
        async with AsyncioModelClient(where, "once") as client:
            return await client.infer_batch(**arrays)

    assert asyncio.run(awaited())["text_output"].tolist() == [b"hello"]


def test_decoupled_clients_of_pytriton(server: TritonServer) -> None:
    where, arrays = f"grpc://{server.grpc_url}", tensors(**HELLO, stream=True)
    with DecoupledModelClient(where, "tokenrouter") as client:
        parts = [part["text_output"][0] for part in client.infer_batch(**arrays)]
    assert b"".join(parts) == b"hello"

    async def awaited() -> list[Any]:
        async with AsyncioDecoupledModelClient(where, "tensorrt_llm_bls") as client:
            return [part["text_output"][0] async for part in client.infer_batch(**arrays)]

    assert b"".join(asyncio.run(awaited())) == b"hello"
    with (
        ModelClient(where, "tokenrouter") as client,
        pytest.raises(PyTritonClientInferenceServerError, match="decoupled"),
    ):
        client.infer_batch(**arrays)


@pytest.mark.parametrize("model", ["once", "ensemble_once", "llmapi_once"])
def test_a_model_of_one_response_cannot_stream(server: TritonServer, model: str) -> None:
    if model == "llmapi_once":
        arrays = tensors(text_input="hello", streaming=True, flat=True)
    else:
        arrays = tensors(**HELLO, stream=True)
    with pytest.raises(InferenceServerException, match="stream is true, but this model is not decoupled"):
        infer(server, model, arrays)


@pytest.mark.parametrize("model", ["once", "tokenrouter"])
def test_a_deployments_defaults(server: TritonServer, model: str) -> None:
    assert answer(server, model, text_input="hello")["text_output"] == "hell"
    asked = {"max_tokens": 2, "exclude_input_in_output": False}
    assert answer(server, model, text_input="hello", **asked)["text_output"] == "hellohe"


# --- NVIDIA's chain of models -----------------------------------------------------------------------------------------


def test_ids_in_ids_out_gives_what_the_ensemble_gives(server: TritonServer) -> None:
    """What `end_to_end_test.py` does with every prompt of its data set."""
    prompt, length = "Grüße, 世界", 40
    first = infer(
        server,
        "preprocessing",
        tensors(QUERY=prompt, BAD_WORDS_DICT="", STOP_WORDS_DICT="", REQUEST_OUTPUT_LEN=length),
    )
    passed_on = {
        "input_ids": "INPUT_ID",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
        "stop_words_list": "STOP_WORDS_IDS",
        "bad_words_list": "BAD_WORDS_IDS",
    }
    arrays = {name: first.as_numpy(output) for name, output in passed_on.items()}
    second = infer(server, "tensorrt_llm", {**arrays, **tensors(exclude_input_in_output=False, return_log_probs=True)})
    output, lengths = second.as_numpy("output_ids"), second.as_numpy("sequence_length")
    prompt_ids = arrays["input_ids"][0].tolist()
    assert output.shape == (1, 1, int(lengths[0][0]))
    assert output[0][0].tolist() == [*prompt_ids, *prompt_ids, END_ID]
    assert second.as_numpy("output_log_probs").shape == (1, 1, len(prompt_ids) + 1)
    third = infer(server, "postprocessing", {"TOKENS_BATCH": output, "SEQUENCE_LENGTH": lengths})
    whole = tensors(text_input=prompt, max_tokens=length, bad_words="", stop_words="", exclude_input_in_output=False)
    assert third.as_numpy("OUTPUT").tolist() == infer(server, "ensemble_once", whole).as_numpy("text_output").tolist()


def test_words_as_ids_end_and_ban(server: TritonServer) -> None:
    prompt = tensors(input_ids=[65, 66, 67, 68, 0, 0], input_lengths=4, request_output_len=4, end_id=-1)
    words = {"stop_words_list": np.array([[[66, 0], [1, -1]]], np.int32)}
    result = infer(server, "tensorrt_llm", {**prompt, **words, **tensors(exclude_input_in_output=True)})
    assert result.as_numpy("output_ids").tolist() == [[[65, 66]]]
    banned = infer(server, "tensorrt_llm", {**prompt, "bad_words_list": words["stop_words_list"]})
    assert 66 not in banned.as_numpy("output_ids")[0][0].tolist()


# --- a request that ends another --------------------------------------------------------------------------------------

STOP = {"input_ids": 0, "input_lengths": 0, "stop": True}


def test_stop_ends_a_request_that_gives_one_response(server: TritonServer) -> None:
    request_id, answers = str(next(REQUEST_ID)), []
    wait_idle(server)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:

        def call(arrays: Tensors) -> None:
            client.async_infer(
                "tensorrt_llm",
                inputs(grpcclient, arrays),
                request_id=request_id,
                callback=lambda result, error: answers.append((result, error)),
                parameters={"Streaming": False},
            )

        call(tensors(input_ids=[65, 66], input_lengths=2, request_output_len=FOREVER, end_id=-1))
        until(lambda: metric(server, "open_requests", model="small"), what="the request runs")
        call(tensors(**STOP, request_output_len=0))
        until(lambda: len(answers) == 2, what="both answers")
    assert [error.status() for _, error in answers] == ["StatusCode.CANCELLED"] * 2


def test_stop_ends_a_stream_without_an_error(server: TritonServer) -> None:
    request_id = str(next(REQUEST_ID))
    with GrpcStream(server) as call:
        fields = tensors(input_ids=[65, 66], input_lengths=2, streaming=True, end_id=-1)
        length = {"request_output_len": rows(FOREVER, np.uint32)}
        call.send({**fields, **length}, model="tensorrt_llm_old", request_id=request_id)
        until(lambda: call.of(request_id), what="the first token")
        stop = {**tensors(**STOP), "request_output_len": rows(0, np.uint32)}
        call.send(stop, model="tensorrt_llm_old", request_id=request_id)
        until(lambda: sum(message.final for message in call.of(request_id)) == 2, what="both ends")
        assert not any(message.error for message in call.messages)
        # One for a request that is over does no harm either.
        call.send(stop, model="ensemble", request_id=request_id)
        until(lambda: sum(message.final for message in call.of(request_id)) == 3, what="the third end")


# --- clients that were tried elsewhere: what they send ----------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("model", ["ensemble_old", "ensemble"])
def test_langchain_and_llama_index(server: TritonServer, model: str, streams: bool) -> None:
    """Neither asks for empty final responses; both wait for one that carries the FINAL flag, then send a stop signal.

    langchain-nvidia-trt 0.0.1rc0 sends UINT32, llama-index-llms-nvidia-triton 0.6.0 INT32.
    """
    numbers = np.uint32 if model == "ensemble_old" else np.int32
    request_id = str(next(REQUEST_ID))
    fields = tensors(
        text_input="hello", max_tokens=5, top_k=1, beam_width=1, top_p=0.0, temperature=1.0, stream=streams,
        length_penalty=1.0, repetition_penalty=1.0, random_seed=np.array([[42]], np.uint64), integers=numbers,
    )  # fmt: skip
    with GrpcStream(server) as call:
        call.send(fields, model=model, request_id=request_id, empty_final=False)
        until(lambda: call.over(request_id), what="the end")
        assert "".join(message.text for message in call.messages) == "hello"
        stop = {**tensors(**STOP), "request_output_len": rows(0, np.uint32)}
        call.send(stop, model=model, request_id=request_id, empty_final=False)
        call.close()
    assert not any(message.error for message in call.messages)


def test_litellm(server: TritonServer) -> None:
    """Its `/generate` nests the fields; its `/infer` has no batch dimension and reads the first output."""
    body = {"text_input": "hello", "parameters": {"max_tokens": 3, "temperature": 0.0}, "stream": False}
    status, reply = generate(server, body)
    assert (status, reply["text_output"]) == (200, "hel")
    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        result = client.infer("flat", inputs(httpclient, tensors(text_input="hello", max_tokens=3, flat=True)))
        assert [output["name"] for output in result.get_response()["outputs"]] == ["text_output"]
        assert text(result) == "hel"


@pytest.mark.parametrize("model", ["llmapi", "llmapi_once"])
def test_tensors_of_llmapi(server: TritonServer, model: str) -> None:
    sampling = {"max_tokens": 4, "temperature": 0.0, "top_k": 0, "top_p": 0.0, "stop": ["zz", "ll"]}
    fields = {f"sampling_param_{name}": value for name, value in sampling.items()}
    arrays = tensors(
        text_input="hello", **fields, sampling_param_exclude_input_from_output=False, return_finish_reason=True,
        return_cumulative_logprob=True, sampling_param_seed=np.array([7], np.uint64), flat=True,
    )  # fmt: skip
    with GrpcStream(server) as call:
        call.send(arrays, model=model, request_id="llmapi")
        until(lambda: call.over("llmapi"), what="the end")
    (data,) = [message for message in call.messages if message.tensors]
    assert data.text == "hellohell"
    assert data.finish_reason == "stop"
    assert data.tensors["cumulative_logprob"].reshape(-1)[0] < 0


def test_a_batch_is_refused_by_its_prompt(server: TritonServer) -> None:
    fields = {"max_tokens": np.array([[3], [3]], np.int32), "beam_width": np.array([[1], [1]], np.int32)}
    arrays = {**fields, "text_input": np.array([[b"a"], [b"b"]], np.object_)}
    with pytest.raises(InferenceServerException, match="one prompt per request: text_input has 2 rows"):
        infer(server, "ensemble_once", arrays)
