"""Sizes of a checkpoint in Hugging Face format, from config.json and the safetensors files: weights, KV per token."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenrouter.checkpoint import read_json
from tokenrouter.errors import ConfigError
from tokenrouter.weights import StoredTensor, stored_tensors

_STORED_DTYPES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4, "fp8": 1}
_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelShape:
    """What the memory of a decoder-only model with full attention depends on.

    Attributes:
        path: config.json, for error texts.
        family: `model_type`.
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab: sizes.
        tied: whether the LM head is the input embedding.
        dtype: of the stored weights.
        max_context: `max_position_embeddings`, or None.
        quantized: whether config.json has a `quantization_config`.
    """

    path: Path
    family: str
    layers: int
    hidden: int
    intermediate: int | None
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    dtype: str
    max_context: int | None
    quantized: bool

    @property
    def parameters(self) -> int:
        """Number of weights.

        Per layer: q and o (hidden x heads x head_dim each), k and v (hidden x kv_heads x head_dim each), gate, up, down
        (hidden x intermediate each), two norms; Qwen2 adds biases of q, k, v, Qwen3 a norm of head_dim for q and k.

        Raises:
            ConfigError: a family whose formula is not known.
        """
        if self.family not in _FAMILIES:
            raise ConfigError(
                f"{self.path}: model_type is {self.family!r}; without safetensors files weights can be computed for "
                f"{', '.join(_FAMILIES)} only"
            )
        if self.intermediate is None:
            raise ConfigError(f"{self.path}: intermediate_size is null; a whole number of at least 1 is needed")
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * self.hidden * q + 2 * self.hidden * kv + 3 * self.hidden * self.intermediate + 2 * self.hidden
        layer += {"llama": 0, "qwen2": q + 2 * kv, "qwen3": 2 * self.head_dim}[self.family]
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * layer + embeddings + self.hidden

    def kv_bytes_per_token(self, *, tensor_parallel_size: int = 1, dtype: str = "auto") -> int:
        """Bytes that one token's keys and values take on one GPU: KV heads are split, below one head repeated."""
        heads = -(-self.kv_heads // tensor_parallel_size)
        return 2 * self.layers * heads * self.head_dim * dtype_bytes(self.dtype if dtype == "auto" else dtype)

    def weight_bytes(self, *, dtype: str = "auto") -> int:
        """Bytes of all weights as they are loaded: of the safetensors files if there are any, else computed.

        Args:
            dtype: what weights are converted to; "auto" keeps the checkpoint's own.

        Raises:
            ConfigError: neither the files nor the formula tell.
        """
        target = dtype_bytes(self.dtype if dtype == "auto" else dtype)
        stored = stored_tensors(self.path.parent)
        if not stored and self.quantized:
            raise ConfigError(f"{self.path}: quantized weights without safetensors files; their size is not known")
        if not stored:
            return self.parameters * target
        if self.tied:
            stored.pop("lm_head.weight", None)
        return sum(
            tensor.elements * target if tensor.floating and not self.quantized else tensor.size
            for tensor in stored.values()
        )


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number.

    Raises:
        ConfigError: unknown name.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}; known: auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def read_shape(folder: Path) -> ModelShape:
    """The sizes of a checkpoint.

    Raises:
        ConfigError: config.json is missing or lacks a field, or a file of the weights is broken; names it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; give a checkpoint folder in Hugging Face format")
    fields = _Fields(path)

    def size(key: str, default: int | None = None) -> int:
        value = fields.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path}: {key} is {json.dumps(value)}; a whole number of at least 1 is needed")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    return ModelShape(
        path=path,
        family=str(fields.get("model_type") or ""),
        layers=size("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.get("intermediate_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        vocab=size("vocab_size"),
        tied=bool(fields.get("tie_word_embeddings")),
        dtype=fields.dtype() or _most_stored(stored_tensors(folder)),
        max_context=fields.get("max_position_embeddings"),
        quantized="quantization_config" in fields.whole,
    )


class _Fields:
    """What config.json says; for what it leaves out, or calls by another name, what transformers makes of it.

    A model of text and images keeps the language model's fields in a part of their own.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self.whole = read_json(path)
        self._parts = [part for part in (self.whole.get("text_config"), self.whole) if isinstance(part, dict)]

    def get(self, key: str) -> Any:
        """None if nobody knows."""
        for part in self._parts:
            if part.get(key) is not None:
                return part[key]
        return getattr(self._known, key, None)

    def dtype(self) -> str | None:
        """Named `dtype` by transformers 5, `torch_dtype` before."""
        return next((str(part[key]) for part in self._parts for key in ("dtype", "torch_dtype") if part.get(key)), None)

    @cached_property
    def _known(self) -> Any:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
            return config.get_text_config(decoder=True)
        except Exception:  # unknown to it, or a field that it refuses: whoever needs the field names it
            return None


def _most_stored(stored: dict[str, StoredTensor]) -> str:
    """The dtype of most bytes."""
    sizes: Counter[str] = Counter()
    for tensor in stored.values():
        if tensor.floating:
            sizes[_STORED_DTYPES[tensor.dtype]] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "float32"
