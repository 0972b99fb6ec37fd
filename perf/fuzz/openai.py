"""Malformed requests to `/v1`; the fields are those of the server's own request types."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from perf.fuzz.http import HttpKind, HttpRequest
from perf.fuzz.values import damaged, json_bytes, nested, odd_value
from tokenrouter.openai_api.requests import ChatCompletionRequest, CompletionRequest

_PATHS: Mapping[str, type[CompletionRequest] | type[ChatCompletionRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}
_GOOD: dict[str, Any] = {
    "model": "tokenrouter",
    "prompt": "Start 1: +1 =",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 2,
}


def odd_fields(draw: random.Random) -> HttpRequest:
    path = draw.choice(list(_PATHS))
    names = list(_PATHS[path].model_fields)
    fields = {name: odd_value(draw) for name in draw.sample(names, draw.randint(1, 3))}
    return HttpRequest("odd fields", path, json_bytes({**_GOOD, **fields}))


def no_prompt(draw: random.Random) -> HttpRequest:
    bodies: Sequence[Any] = (
        *({}, [], None, "text", 7, {"model": "tokenrouter"}, {**_GOOD, "model": "no-such-model"}),
        *({**_GOOD, "prompt": []}, {**_GOOD, "prompt": ""}, {**_GOOD, "prompt": [[]]}, {**_GOOD, "prompt": [-1]}),
        *({**_GOOD, "messages": []}, {**_GOOD, "messages": [{}]}, {**_GOOD, "messages": [{"role": "nobody"}]}),
        *({**_GOOD, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {**_GOOD, "prompt": [10**9]}),
        *({**_GOOD, "prompt": ["a"] * 200}, {**_GOOD, "policy": "no_such_policy"}, {**_GOOD, "n": 3}),
    )
    return HttpRequest("no prompt or wrong", draw.choice(list(_PATHS)), json_bytes(draw.choice(bodies)))


def policy(draw: random.Random) -> HttpRequest:
    body = {**_GOOD, "policy": draw.choice(("r2r", "random", "me", "markov", "scripted", "single", "x:y", ""))}
    name = draw.choice(("threshold", "p", "weights", "writers", "routing", "checkpoint"))
    return HttpRequest("policy", "/v1/completions", json_bytes({**body, "policy_params": {name: odd_value(draw)}}))


def broken_json(draw: random.Random) -> HttpRequest:
    return HttpRequest("broken JSON", draw.choice(list(_PATHS)), damaged(draw, json_bytes(_GOOD)))


def deep_json(draw: random.Random) -> HttpRequest:
    deep = nested(draw.choice((100, 1_000, 20_000)), *draw.choice(((b"[", b"]"), (b'{"a":', b"}"))))
    body = draw.choice((deep, b'{"model":"tokenrouter","prompt":"a","max_tokens":2,"policy_params":' + deep + b"}"))
    return HttpRequest("deep JSON", draw.choice(list(_PATHS)), body)


def wrong_path(draw: random.Random) -> HttpRequest:
    paths = ("/", "/v1", "/v1/models/none", "/v1/models/%00", "/v1/completions/x", "/v1/embeddings", "/" * 500)
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"))
    return HttpRequest("path or method", draw.choice(paths), json_bytes(_GOOD), method)


def odd_headers(draw: random.Random) -> HttpRequest:
    headers = {
        "Content-Type": draw.choice(("text/plain", "application/xml", "multipart/form-data", "", "text/json;x")),
        draw.choice(("X-Long", "Authorization", "Cookie", "Content-Encoding", "Accept")): "gzip"
        * draw.choice((1, 900)),
    }
    return HttpRequest("headers", "/v1/completions", json_bytes(_GOOD), headers=headers)


def oversized(draw: random.Random) -> HttpRequest:
    fields: Sequence[dict[str, Any]] = (
        *({"prompt": "x" * 2_000_000}, {"prompt": "x" * 5_000_000}, {"prompt": [1] * 200_000}),
        *({"stop": ["a"] * 5_000}, {"policy_params": {"x": "y" * 100_000}}, {"max_tokens": 2**31 - 1}),
        *({"messages": [{"role": "user", "content": "x" * 2_000_000}]},),
    )
    return HttpRequest("oversized", draw.choice(list(_PATHS)), json_bytes({**_GOOD, **draw.choice(fields)}))


KINDS: Sequence[tuple[HttpKind, int]] = (
    (odd_fields, 40),
    (no_prompt, 15),
    (policy, 15),
    (broken_json, 15),
    (deep_json, 2),
    (wrong_path, 8),
    (odd_headers, 4),
    (oversized, 1),
)


def openai_request(draw: random.Random) -> HttpRequest:
    """One malformed request."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: HttpKind = draw.choices(kinds, weights)[0]
    return kind(draw)
