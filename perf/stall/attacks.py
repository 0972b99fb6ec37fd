"""Requests that a client can send and that cost much to read."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MODEL = "tokenrouter"
HEAVY_CHECKPOINT = "tokenrouter/1/routers/heavy"
"""A Hugging Face folder in the repository that `query_level` can load as its router."""
_PATIENCE_S = 300.0


def _body(**fields: Any) -> bytes:
    return json.dumps({"text_input": "abcdefgh", "max_tokens": 1, **fields}).encode()


def _params(policy: str, **params: Any) -> dict[str, str]:
    return {"policy": policy, "policy_params": json.dumps(params)}


ATTACKS: Mapping[str, Callable[[int], bytes]] = MappingProxyType(
    {
        "nothing": lambda _: b"",
        "prompt of 10 MB": lambda _: _body(text_input="x" * 10_000_000),
        "prompt of 1 MB": lambda _: _body(text_input="hello world " * 83_000),
        "prompt of 100 kB, served": lambda _: _body(text_input="hello world " * 8_000),
        "300,000 stop words": lambda _: _body(stop_words=["stop"] * 300_000),
        "100,000 bad words": lambda _: _body(bad_words=["bad"] * 100_000),
        "256 bad words of 1 KiB": lambda _: _body(bad_words=["b" * 1024] * 256),
        "3,000,000 writers": lambda _: _body(**_params("scripted", writers=[0] * 3_000_000)),
        "5,000,000 ids": lambda _: _body(text_input=None, input_ids=[97] * 5_000_000),
        "1,000,000 ids": lambda _: _body(text_input=None, input_ids=[97] * 1_000_000),
        "policy_params of 20 MB": lambda n: _body(policy="single", policy_params=" " * (20_000_000 + n) + "{}"),
        "policy_params of 64 kB": lambda n: _body(**_params("scripted", writers=[0] * (21_000 - n))),
        "policy that loads a file": lambda n: _body(
            **_params("query_level", router="bert", checkpoint=HEAVY_CHECKPOINT, threshold=n / 1000)
        ),
    }
)
"""The body of `/generate` by the attack's name and a number, which differs from call to call."""


@dataclass(frozen=True)
class Answer:
    """Status and text of what came back."""

    status: int
    text: str


def attack(http_url: str, bodies: list[bytes]) -> list[Answer]:
    """Sends bodies to `/generate`, all at once, and waits for the answers; an empty one is not sent."""
    with ThreadPoolExecutor(max(1, len(bodies))) as pool:
        return list(pool.map(lambda body: _post(http_url, body), filter(None, bodies)))


def _post(http_url: str, body: bytes) -> Answer:
    connection = http.client.HTTPConnection(http_url.removeprefix("http://"), timeout=_PATIENCE_S)
    try:
        connection.request("POST", f"/v2/models/{MODEL}/generate", _without_nulls(body))
        response = connection.getresponse()
        return Answer(response.status, response.read(2000).decode("utf-8", "replace"))
    finally:
        connection.close()


def _without_nulls(body: bytes) -> bytes:
    """Fields that are null are left out."""
    return body.replace(b'"text_input": null, ', b"", 1)
