"""A small gRPC client: one streamed response at a time, for the command line and for tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from tokenrouter.errors import RouterError
from tokenrouter.triton.tensors import ENTRY_INPUTS

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "STRING": np.object_,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}


class ServerError(RouterError):
    """What the server answered instead of a response, or why it could not be reached."""


@dataclass(frozen=True)
class Chunk:
    """One streamed response of the entry model.

    Attributes:
        text: new text.
        output_ids: new token ids.
        routing: `runs` of the new tokens; in the last chunk also `tokens`, `handoffs`, `policy` and `seed`.
        finish_reason: of the last chunk, else "".
    """

    text: str
    output_ids: list[int]
    routing: dict[str, Any]
    finish_reason: str


def stream(url: str, prompt: str, *, model: str = "tokenrouter", **fields: Any) -> Iterator[Chunk]:
    """Streams one response.

    Args:
        url: host:port of Triton's gRPC endpoint.
        prompt: the prompt's text.
        model: name of the entry model.
        fields: further input tensors by name, for example `max_tokens=96, policy="rstitch"`.

    Raises:
        ServerError: the server refused the request, failed, or cannot be reached.
    """
    values = {"text_input": prompt, "stream": True, "return_routing": True, **fields}
    inputs = [infer_input(name, value) for name, value in values.items() if value is not None]
    answers: Queue[tuple[Any, Any]] = Queue()
    try:
        with grpcclient.InferenceServerClient(url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            try:
                client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            except grpcclient.InferenceServerException:
                # Why the stream broke is told to the callback only.
                if answers.empty():
                    raise
            yield from _chunks(answers)
    except grpcclient.InferenceServerException as exc:
        raise ServerError(f"{url}: {exc.message()}") from exc


def _chunks(answers: Queue[tuple[Any, Any]]) -> Iterator[Chunk]:
    while True:
        result, error = answers.get()
        if error is not None:
            raise error
        response = result.get_response()
        if response.outputs:
            yield _chunk(result)
        if response.parameters["triton_final_response"].bool_param:
            return


def _chunk(result: Any) -> Chunk:
    reason = result.as_numpy("finish_reason")
    return Chunk(
        text=result.as_numpy("text_output")[0].decode("utf-8"),
        output_ids=result.as_numpy("output_ids").tolist(),
        routing=json.loads(result.as_numpy("routing")[0]),
        finish_reason="" if reason is None else reason[0].decode("utf-8"),
    )


def input_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A value, or a list of values, as the entry model's input tensor of this name: [1, values]; text is bytes."""
    kind = ENTRY_INPUTS[name].type
    values = value if isinstance(value, (list, tuple)) else [value]
    if kind == "STRING":
        values = [text.encode("utf-8") for text in values]
    return np.array([values], dtype=_DTYPES[kind])


def infer_input(name: str, value: Any) -> Any:
    array = input_array(name, value)
    tensor = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor
