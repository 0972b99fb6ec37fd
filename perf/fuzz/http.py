"""Malformed requests to Triton's HTTP endpoint: /generate, /generate_stream, /infer, and paths that do not exist."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from perf.fuzz.values import damaged, json_bytes, nested, odd_value
from tokenrouter.triton.tensors import ENTRY_INPUTS

GENERATE = "/v2/models/tokenrouter/generate"
GOOD: dict[str, Any] = {"text_input": "Start 1: +1 =", "max_tokens": 2}
"""What is broken; as it is, it takes two tokens."""


@dataclass(frozen=True)
class HttpRequest:
    """A request as it is sent, and what is wrong with it."""

    kind: str
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


HttpKind: TypeAlias = Callable[[random.Random], HttpRequest]
NAMES = tuple(ENTRY_INPUTS)


def _generate(draw: random.Random, kind: str, body: bytes) -> HttpRequest:
    return HttpRequest(kind, draw.choice((GENERATE, GENERATE + "_stream")), body)


def odd_fields(draw: random.Random) -> HttpRequest:
    """One to three fields of any kind with values of any kind."""
    fields = {name: odd_value(draw) for name in draw.sample(NAMES, draw.randint(1, 3))}
    return _generate(draw, "odd fields", json_bytes({**GOOD, **fields}))


def unknown_field(draw: random.Random) -> HttpRequest:
    name = draw.choice(NAMES)
    place = draw.randrange(len(name))
    return _generate(draw, "unknown field", json_bytes({**GOOD, name[:place] + "x" + name[place:]: odd_value(draw)}))


def no_prompt(draw: random.Random) -> HttpRequest:
    bodies: Sequence[Any] = (
        *({}, {"max_tokens": 2}, {**GOOD, "input_ids": [1, 2]}, {"input_ids": [], "max_tokens": 2}),
        *({"input_ids": [-1], "max_tokens": 2}, {"input_ids": [2**31 - 1], "max_tokens": 2}),
        *({"text_input": "", "max_tokens": 2}, {"text_input": ["a", "b"], "max_tokens": 2}, [], None, 7, "text"),
    )
    return _generate(draw, "no prompt or two", json_bytes(draw.choice(bodies)))


def policy(draw: random.Random) -> HttpRequest:
    names = ("rstitch", "r2r", "citer", "collm", "query_level", "random", "me", "markov", "scripted", "single")
    name = draw.choice((*names, "", "os:system", "no_such_policy", "tokenrouter.cli:main", "../r2r"))
    params = {draw.choice(("threshold", "checkpoint", "p", "weights", "writers", "routing", "x")): odd_value(draw)}
    text = draw.choice((json_bytes(params).decode(), damaged(draw, json_bytes(params)).decode("latin-1")))
    return _generate(draw, "policy", json_bytes({**GOOD, "policy": name, "policy_params": text}))


def broken_json(draw: random.Random) -> HttpRequest:
    body = json_bytes({**GOOD, "policy": "random", "policy_params": '{"p": 0.5}', "stop_words": ["x", "y"]})
    return _generate(draw, "broken JSON", damaged(draw, body))


def deep_json(draw: random.Random) -> HttpRequest:
    deep = nested(draw.choice((100, 1_000, 20_000)), *draw.choice(((b"[", b"]"), (b'{"a":', b"}"))))
    name = draw.choice(NAMES).encode()
    body = draw.choice((deep, b'{"text_input":"a","max_tokens":2,"' + name + b'":' + deep + b"}"))
    return _generate(draw, "deep JSON", body)


def wrong_path(draw: random.Random) -> HttpRequest:
    paths = (
        *("/", "/v2/models/tokenrouter", "/v2/models//generate", "/v2/models/none/generate", GENERATE + "/x"),
        *("/v2/models/tokenrouter/versions/99/generate", "/v2/models/tokenrouter/versions/x/infer", "/v2/nothing"),
        *("/v2/models/small/generate?a=b", "/v2/models/%2e%2e%2f/infer", "/v2/models/tokenrouter/infer/%00", "/" * 500),
        *("/v2/models/tokenrouter/trace/setting", "/v2/systemsharedmemory/region/x/register", "/v2/logging"),
    )
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"))
    return HttpRequest("path or method", draw.choice(paths), json_bytes(GOOD), method)


def odd_headers(draw: random.Random) -> HttpRequest:
    headers = {
        draw.choice(("Content-Type", "Content-Encoding", "Accept", "Inference-Header-Content-Length", "Expect")): (
            draw.choice(("gzip", "deflate", "text/xml", "-1", "999999999", "abc", "0", "application/octet-stream"))
        ),
        draw.choice(("X-Long", "Authorization", "Cookie")): "v" * draw.choice((1, 100, 3000)),
    }
    return HttpRequest("headers", GENERATE, json_bytes(GOOD), headers=headers)


def odd_tensors(draw: random.Random) -> HttpRequest:
    """/infer with shapes, types and data that do not fit each other."""
    tensor: dict[str, Any] = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    tensor[draw.choice(("name", "shape", "datatype", "data", "parameters"))] = odd_value(draw)
    limit = {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [2]}
    body: dict[str, Any] = {"inputs": [tensor, limit]}
    if draw.random() < 0.3:
        body[draw.choice(("id", "outputs", "inputs", "parameters"))] = odd_value(draw)
    path = f"/v2/models/{draw.choice(('tokenrouter', 'small', 'large', 'ensemble'))}/infer"
    return HttpRequest("tensors", path, json_bytes(body))


def oversized(draw: random.Random) -> HttpRequest:
    """Over a limit of the deployment, or of Triton."""
    count = draw.choice((3_000, 100_000))
    fields: Sequence[dict[str, Any]] = (
        *({"text_input": "x" * 2_000_000}, {"policy_params": " " * 200_000}, {"stop_words": ["a"] * count}),
        *({"bad_words": ["a"] * count}, {"stop_words": ["a" * 5_000]}, {"max_tokens": 2**31 - 1}),
    )
    return _generate(draw, "oversized", json_bytes({**GOOD, **draw.choice(fields)}))


KINDS: Sequence[tuple[HttpKind, int]] = (
    (odd_fields, 30),
    (unknown_field, 5),
    (no_prompt, 10),
    (policy, 15),
    (broken_json, 15),
    (deep_json, 2),
    (wrong_path, 8),
    (odd_headers, 5),
    (odd_tensors, 20),
    (oversized, 1),
)
"""Generators with their weights."""


def http_request(draw: random.Random) -> HttpRequest:
    """One malformed request."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: HttpKind = draw.choices(kinds, weights)[0]
    return kind(draw)
