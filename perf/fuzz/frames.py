"""Malformed traffic of the token channel: frames whose payloads are nearly messages, and bytes that are no frames."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from perf.fuzz.values import NUMBERS, damaged, nested, odd_value
from tokenrouter.channel.framing import MAX_FRAME, frame
from tokenrouter.messages import (
    Close,
    Hello,
    InFlight,
    Message,
    ModelInfo,
    Open,
    Outcome,
    PolicySpec,
    Report,
    ReportRow,
    Resume,
    Sampling,
    encode,
)
from tokenrouter.protocol_version import PROTOCOL_VERSION

_POLICY = PolicySpec("single", '{"model": "small"}')
HELLO = Hello(PROTOCOL_VERSION, "stranger", "routed", ("small", "large"), _POLICY)
OPEN = Open(1, 1, 1, [1, 2, 3], 2, 64, Sampling(max_tokens=8, end_ids=(0,), bad_words=((1, 2),)), _POLICY, {"a": 1})
TO_SUBSERVER: Sequence[Message] = (HELLO, OPEN, Resume(1, 2, 1, 3, [4], {"a": 1}), Close(1, 0), InFlight(3))
"""One of every message that an orchestrator sends."""
TO_ORCHESTRATOR: Sequence[Message] = (
    ModelInfo(PROTOCOL_VERSION, "small", "torch", False, 99, 1024, 16, 64),
    Report(1, [ReportRow(1, 1, Outcome.LEAVE, [5], "large", {"a": 1}, [-0.5]), ReportRow(2, 1, Outcome.STOP, [6])]),
    Report(2, [ReportRow(1, 1, Outcome.FAILED, [], error=("internal", "text"))]),
)
"""One of every message that a subserver sends, and of its rows."""

Bytes: TypeAlias = Callable[[random.Random, Sequence[Message]], bytes]


def nearly(draw: random.Random, messages: Sequence[Message]) -> bytes:
    """A message's payload with one part replaced, left out or added."""
    content: Any = msgspec.msgpack.decode(encode(draw.choice(messages)))
    parent = content
    while True:
        index = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        if not (isinstance(parent[index], list | dict) and parent[index] and draw.random() < 0.7):
            break
        parent = parent[index]
    kind = draw.randrange(4)
    if kind == 0:
        del parent[index]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(index, odd_value(draw))
    else:
        parent[index] = draw.choice(NUMBERS) if kind == 2 else odd_value(draw)
    return _packed(content)


def _packed(content: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(content)
    except (OverflowError, UnicodeEncodeError):  # a number over 64 bits or a lone surrogate cannot be written at all
        return b"\xc1"


def damaged_message(draw: random.Random, messages: Sequence[Message]) -> bytes:
    return damaged(draw, encode(draw.choice(messages)))


def noise(draw: random.Random, _: Sequence[Message]) -> bytes:
    return draw.choice((draw.randbytes(draw.randint(0, 200)), nested(draw.choice((100, 100_000)), b"\x91", b"\x01")))


PAYLOADS: Sequence[tuple[Bytes, int]] = ((nearly, 60), (damaged_message, 30), (noise, 10))


def payload(draw: random.Random, messages: Sequence[Message]) -> bytes:
    """The payload of one frame that is no message, or not the one it was."""
    kinds, weights = zip(*PAYLOADS, strict=True)
    kind: Bytes = draw.choices(kinds, weights)[0]
    return kind(draw, messages)


def traffic(draw: random.Random, messages: Sequence[Message] = TO_SUBSERVER) -> tuple[bytes, bytes]:
    """What a peer writes into one connection: a sound greeting or nothing, then frames, in the end perhaps no frame."""
    parts = [frame(payload(draw, messages)) for _ in range(draw.randint(1, 4))]
    kind = draw.randrange(6)
    if kind == 0:
        parts.append((MAX_FRAME + draw.randint(1, 2**30)).to_bytes(4, "little"))
    elif kind == 1:
        parts.append(frame(draw.randbytes(50))[: draw.randrange(50)])
    elif kind == 2:
        parts = [damaged(draw, b"".join(parts))]
    return frame(encode(messages[0])) if draw.random() < 0.7 else b"", b"".join(parts)
