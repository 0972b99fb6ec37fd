"""Who wrote what, as an extra field of a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenrouter.openai_api.tokens import Piece


def routing_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The writer of every token, beside the token's id, in order."""
    tokens = [token for piece in pieces for token in piece.tokens]
    return {"writers": [token.writer for token in tokens], "token_ids": [token.id for token in tokens]}
