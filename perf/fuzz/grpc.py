"""Malformed requests to Triton's gRPC endpoint, as messages and as bytes that are none.

`classification` on an output is left out: it ends tritonserver up to 2.59 by a division by zero (fixed in 2.60), and no
model is asked before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

from perf.fuzz.values import NUMBERS, TEXTS, damaged, odd_value
from tokenrouter.client import input_array
from tokenrouter.triton.tensors import ENTRY_INPUTS
from tools.load import add_input

_SERVICE = "/inference.GRPCInferenceService/"
_NAMES = tuple(ENTRY_INPUTS)
_FITTING = [number for number in NUMBERS if isinstance(number, float) or abs(number) < 2**63]
_TYPES = ("BYTES", "INT32", "INT64", "FP32", "FP64", "BOOL", "UINT8", "UINT64", "FP16", "BF16", "", "WHAT")


@dataclass(frozen=True)
class GrpcRequest:
    """A call of one message, and what is wrong with it."""

    kind: str
    method: str
    payload: bytes

    @property
    def streams(self) -> bool:
        return self.method.endswith("ModelStreamInfer")


GrpcKind: TypeAlias = Callable[[random.Random], GrpcRequest]


def _good() -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="tokenrouter")
    add_input(request, "text_input", input_array("text_input", "Start 1: +1 ="))
    add_input(request, "max_tokens", input_array("max_tokens", 2))
    return request


def _sent(draw: random.Random, kind: str, request: service_pb2.ModelInferRequest) -> GrpcRequest:
    method = draw.choice(("ModelStreamInfer", "ModelStreamInfer", "ModelStreamInfer", "ModelInfer"))
    return GrpcRequest(kind, _SERVICE + method, bytes(request.SerializeToString()))


def odd_values(draw: random.Random) -> GrpcRequest:
    """Tensors of the declared type and shape with values out of every range."""
    request = _good()
    for name in draw.sample(_NAMES, draw.randint(1, 3)):
        if ENTRY_INPUTS[name].type == "STRING":
            values = [draw.choice(TEXTS).encode("utf-8", "surrogatepass") for _ in range(draw.choice((1, 1, 3)))]
            add_input(request, name, np.array([values], dtype=np.object_))
        else:
            with np.errstate(all="ignore"):
                kind = triton_to_np_dtype(ENTRY_INPUTS[name].type)
                add_input(request, name, np.array([[draw.choice(_FITTING)]]).astype(kind))
    return _sent(draw, "odd values", request)


def odd_tensors(draw: random.Random) -> GrpcRequest:
    """Type, shape and bytes that do not fit each other."""
    request = _good()
    tensor = request.inputs.add(
        name=draw.choice(_NAMES),
        datatype=draw.choice(_TYPES),
        shape=[draw.choice((-1, 0, 1, 2, 2**31, 2**62, -(2**63))) for _ in range(draw.randint(0, 4))],
    )
    if draw.random() < 0.3:
        tensor.contents.int_contents.extend([1, 2])
    for _ in range(draw.choice((0, 1, 1, 3))):
        request.raw_input_contents.append(draw.randbytes(draw.choice((0, 1, 4, 5, 64))))
    return _sent(draw, "tensors", request)


def missing(draw: random.Random) -> GrpcRequest:
    request = _good()
    kind = draw.randrange(5)
    if kind == 0:
        del request.raw_input_contents[draw.randrange(2) :]
    elif kind == 1:
        del request.inputs[draw.randrange(2)]
    elif kind == 2:
        request.ClearField("inputs")
    elif kind == 3:
        add_input(request, "input_ids", np.array([[1, 2]], dtype=np.int32))
    else:
        request.inputs[0].CopyFrom(request.inputs[1])
    return _sent(draw, "missing or doubled", request)


def odd_parameters(draw: random.Random) -> GrpcRequest:
    """Request parameters, ids and names."""
    request = _good()
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(("timeout", "priority", "sequence_id", "sequence_start", "triton_final", "headers", "x", ""))
        value = request.parameters[name]
        value.int64_param = draw.choice((0, -1, 1, 2**31, 2**63 - 1, -(2**63)))
        if draw.random() < 0.4:
            value.string_param = draw.choice(TEXTS).encode("utf-8", "replace").decode()
    if draw.random() < 0.3:
        request.id = "i" * draw.choice((1, 1_000, 100_000))
    if draw.random() < 0.3:
        request.model_name = draw.choice(("none", "", "../small", "small", "ensemble"))
    if draw.random() < 0.3:
        request.model_version = draw.choice(("99", "x", "-1"))
    return _sent(draw, "parameters", request)


def odd_outputs(draw: random.Random) -> GrpcRequest:
    request = _good()
    for _ in range(draw.choice((1, 2, 200))):
        output = request.outputs.add(name=draw.choice(("text_output", "none", "", "routing")))
        if draw.random() < 0.3:
            output.parameters["shared_memory_region"].string_param = "none"
            output.parameters["shared_memory_byte_size"].int64_param = draw.choice((-1, 0, 2**62))
    return _sent(draw, "outputs", request)


def policy(draw: random.Random) -> GrpcRequest:
    request = _good()
    names = ("rstitch", "r2r", "query_level", "random", "me", "markov", "scripted", "single", "os:system", "\0")
    add_input(request, "policy", input_array("policy", draw.choice(names)))
    key = draw.choice(("threshold", "checkpoint", "p", "weights", "writers", "routing"))
    text = f'{{"{key}": {odd_value(draw)!r}}}'.encode("utf-8", "surrogatepass")
    add_input(request, "policy_params", np.array([[damaged(draw, text)]], dtype=np.object_))
    return _sent(draw, "policy", request)


def no_message(draw: random.Random) -> GrpcRequest:
    payload = draw.choice((draw.randbytes(draw.randint(0, 200)), damaged(draw, bytes(_good().SerializeToString()))))
    methods = ("ModelStreamInfer", "ModelInfer", "ModelConfig", "RepositoryModelUnload", "SystemSharedMemoryRegister")
    return GrpcRequest("no message", _SERVICE + draw.choice((*methods, "NoSuchMethod")), payload)


def oversized(draw: random.Random) -> GrpcRequest:
    request = _good()
    name, count = draw.choice((("stop_words", 50_000), ("bad_words", 50_000), ("policy_params", 1), ("text_input", 1)))
    if name == "text_input":
        request = service_pb2.ModelInferRequest(model_name="tokenrouter")
    values = [b"a" * (1 if count > 1 else 2_000_000)] * count
    add_input(request, name, np.array([values], dtype=np.object_))
    return _sent(draw, "oversized", request)


KINDS: Sequence[tuple[GrpcKind, int]] = (
    (odd_values, 25),
    (odd_tensors, 20),
    (missing, 10),
    (odd_parameters, 15),
    (odd_outputs, 5),
    (policy, 15),
    (no_message, 15),
    (oversized, 1),
)


def grpc_request(draw: random.Random) -> GrpcRequest:
    """One malformed request."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: GrpcKind = draw.choices(kinds, weights)[0]
    return kind(draw)
