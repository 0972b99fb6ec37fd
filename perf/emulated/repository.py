"""Emulated deployments for measurements: a repository in a temporary folder, from step times and a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tools.build_repository.build import write_repository
from tools.build_repository.spec import DeploymentSpec

END_ID = 256
VOCAB_SIZE = 257
"""Of `byte_tokenizer`."""

# Room for responses that run as long as a measurement.
_LONG = {"repeat": True, "max_seq_len": 1 << 20, "kv_cache_config": {"max_tokens": 1 << 28}}


def write_emulated_repository(
    folder: Path,
    *,
    step_ms: dict[str, float | dict[int, float]],
    entry: dict[str, Any],
    batching: dict[str, dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
    per_model: dict[str, dict[str, Any]] | None = None,
    replicas: Mapping[str, int] | None = None,
) -> Path:
    """Writes a repository of emulated models with a byte-level tokenizer. Returns the folder.

    Args:
        folder: where to.
        step_ms: step time by model, see `EmulatedConfig.step_ms`; small first.
        entry: fields of `EntrySpec`.
        batching: fields of `BatchingSpec` by model.
        options: further options of every engine.
        per_model: further options by model.
        replicas: of each model; one that is left out has 1.
    """
    specs = {
        name: {
            "engine": "emulated",
            "options": {**_LONG, "step_ms": time, **(options or {}), **(per_model or {}).get(name, {})},
            "batching": (batching or {}).get(name, {}),
            "replicas": (replicas or {}).get(name, 1),
        }
        for name, time in step_ms.items()
    }
    return write_emulated(folder, msgspec.convert({"entry": entry, "models": specs}, DeploymentSpec))


def write_emulated(folder: Path, spec: DeploymentSpec, tokenizer: Tokenizer | None = None) -> Path:
    """Writes the repository with a tokenizer and a config.json for every model. Returns the folder.

    Args:
        folder: where to.
        spec: a deployment of emulated models.
        tokenizer: `byte_tokenizer` by default.
    """
    write_repository(spec, folder)
    tokenizer = tokenizer or byte_tokenizer()
    facts = {"eos_token_id": END_ID, "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)}
    for name in spec.models:
        checkpoint = folder / name / "1"
        tokenizer.save(str(checkpoint / "tokenizer.json"))
        (checkpoint / "config.json").write_text(json.dumps(facts))
    return folder


def byte_tokenizer() -> Tokenizer:
    """One token per byte and `<|endoftext|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer
