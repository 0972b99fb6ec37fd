"""Small model repositories on the emulated engine, with a byte-level tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from perf.emulated.repository import END_ID, VOCAB_SIZE, byte_tokenizer, write_emulated
from tools.build_repository.spec import DeploymentSpec

__all__ = ["END_ID", "VOCAB_SIZE", "byte_tokenizer", "emulated_spec", "piece_tokenizer", "write_emulated"]


def piece_tokenizer(*pieces: str) -> Tokenizer:
    """One token per given piece of text, beside the bytes; for stop words that begin or end inside a token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    return tokenizer


def emulated_spec(
    *,
    entry: dict[str, Any] | None = None,
    models: tuple[str, ...] = ("small", "large"),
    options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    per_model: dict[str, dict[str, Any]] | None = None,
) -> DeploymentSpec:
    """A deployment of emulated models.

    Args:
        entry: fields of `EntrySpec`; by default positions alternate between all models.
        models: names, small first.
        options: engine options of every model (see `EmulatedConfig`).
        model: fields of `ModelSpec` of every model.
        per_model: fields of `ModelSpec` by model; `options` are merged.
    """
    entry = {"policy": "scripted", "policy_params": {"writers": list(models)}, **(entry or {})}
    specs = {}
    for name in models:
        own = dict((per_model or {}).get(name, {}))
        own_options = {**(options or {}), **own.pop("options", {})}
        specs[name] = {"engine": "emulated", "options": own_options, **(model or {}), **own}
    return msgspec.convert({"entry": entry, "models": specs}, DeploymentSpec)
