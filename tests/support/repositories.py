"""Small model repositories on the emulated engine, with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from perf.emulated.repository import byte_tokenizer
from tools.build_repository.build import write_repository
from tools.build_repository.spec import DeploymentSpec

END_ID = 256
VOCAB_SIZE = 257


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


def write_emulated(folder: Path, spec: DeploymentSpec, tokenizer: Tokenizer | None = None) -> Path:
    """Writes the repository with a tokenizer and a config.json for every model. Returns the folder."""
    write_repository(spec, folder)
    tokenizer = tokenizer or byte_tokenizer()
    for name in spec.models:
        checkpoint = folder / name / "1"
        tokenizer.save(str(checkpoint / "tokenizer.json"))
        facts = {"eos_token_id": END_ID, "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)}
        (checkpoint / "config.json").write_text(json.dumps(facts))
    return folder
