"""Values that no field expects, drawn from a seeded generator."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

NUMBERS: Sequence[Any] = (
    *(0, -1, 1, 2, 255, -(2**31), 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64),
    *(10**40, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf),
)
TEXTS: Sequence[str] = (
    *("", " ", "\0", "a", "\ud800", "\ufffe\uffff", "{}", "[]", "null", "NaN", "true", "-1", "../../etc/passwd"),
    *("%00%0a", "{{7*7}}", "'; --", "<|endoftext|>", "\u202e\u0301" * 40, "z" * 3000),
)


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say, and NaN: a number, a text, a flag, nothing, or lists and objects of such."""
    kind = draw.randrange(8 if depth < 3 else 5)
    if kind <= 1:
        return draw.choice(NUMBERS)
    if kind <= 3:
        return draw.choice(TEXTS)
    if kind == 4:
        return draw.choice((None, True, False))
    members = [odd_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2, 5)))]
    return members if kind <= 6 else {str(odd_value(draw, 3)): member for member in members}


def json_bytes(value: Any) -> bytes:
    """As lenient clients write it: NaN and Infinity as words, lone surrogates as escapes."""
    return json.dumps(value).encode()


def damaged(draw: random.Random, text: bytes) -> bytes:
    """Cut off, with bytes flipped, doubled, or something put into the middle."""
    place = draw.randrange(len(text) + 1)
    kind = draw.randrange(5)
    if kind == 0:
        return text[:place]
    if kind == 1:
        flipped = bytearray(text or b"\0")
        for _ in range(draw.randint(1, 8)):
            flipped[draw.randrange(len(flipped))] = draw.randrange(256)
        return bytes(flipped)
    if kind == 2:
        return text[:place] + draw.randbytes(draw.randint(1, 40)) + text[place:]
    if kind == 3:
        return text + text
    return text[:place] + text[draw.randrange(len(text) + 1) :]


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + closing * depth
