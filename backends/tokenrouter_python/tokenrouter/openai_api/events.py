"""Server-sent events of a stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

# A chunk is a dict, since it is made for every token: the package's models take 50 us each to build and write.
Chunk: TypeAlias = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """Anything as an event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def chunk(kind: str, answer_id: str, created: int, model: str, choices: Sequence[Chunk]) -> Chunk:
    """What every chunk of an answer has; `kind` is its `object`, `created` in s since 1970."""
    return {"id": answer_id, "choices": choices, "created": created, "model": model, "object": kind}


class TextEvents:
    """Events of chunks that differ in one text alone; everything else of them is encoded once.

    Args:
        chunk: one of them, the text empty.
        field: name of the text, of which there is no other one.
    """

    def __init__(self, chunk: Chunk, field: str) -> None:
        # Within a text the quotes would be escaped, so that this can only be the field.
        self._before, self._after = event(chunk).split(f'"{field}":""'.encode())
        self._before += f'"{field}":'.encode()

    def of(self, text: str) -> bytes:
        """The event of this text."""
        return b"".join((self._before, msgspec.json.encode(text), self._after))
