"""Small models with random weights in transformers and in our engine, and what either writes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine

VOCAB = 97
CONTEXT = 192
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # large enough that logits differ clearly and sequences do not settle on one token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ("qwen3", "llama")


def save(folder: Path, config: Any) -> Path:
    torch.manual_seed(7)
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_kind(folder: Path, kind: str) -> Path:
    """One of `KINDS`."""
    return save(
        folder,
        transformers.Qwen3Config(**SIZES, head_dim=16) if kind == "qwen3" else transformers.LlamaConfig(**SIZES),
    )


def load_reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()


def load(folder: Path, *, block_tokens: int = 16, max_tokens: int = 6000, **settings: Any) -> TorchEngine:
    cache = KvCacheConfig(tokens_per_block=block_tokens, max_tokens=max_tokens)
    defaults: dict[str, Any] = {"device": "cpu", "threads": 1, "max_batch_size": 64, "max_num_tokens": 2048}
    return TorchEngine.from_folder(folder, TorchEngineConfig(**{**defaults, **settings}, kv_cache_config=cache))


def random_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(f"{seed}/{count}")
    return [rng.randrange(vocab) for _ in range(count)]


def greedy(reference: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What `generate` writes. The mask is given, as generate would else hide tokens that equal the padding."""
    ids = torch.tensor([list(prompt)])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


def extend(engine: TorchEngine, handle: Any, tokens: Sequence[int]) -> torch.Tensor:
    return engine.step([EngineRow(handle, tokens)]).logits[0]


def decode(engine: TorchEngine, handle: Any, prompt: Sequence[int], count: int) -> list[int]:
    out: list[int] = []
    new = prompt
    while len(out) < count:
        out.append(int(extend(engine, handle, new).argmax()))
        new = out[-1:]
    return out
