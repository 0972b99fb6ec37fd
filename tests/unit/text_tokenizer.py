"""A tokenizer whose vocabulary a test names, for policies that work on text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models


def tokenizer_of(pieces: Sequence[str], special: Sequence[str] = ()) -> Tokenizer:
    """Token i is pieces[i]; decoding joins texts without anything between them. `special` follow as special tokens."""
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return tokenizer
