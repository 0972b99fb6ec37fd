"""Sizes of a checkpoint in Hugging Face format, from config.json and the safetensors files: weights, KV per token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenrouter.checkpoint import read_json
from tokenrouter.errors import ConfigError

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
    intermediate: int
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
            dtype: what weights are converted to; "auto" keeps the stored one.

        Raises:
            ConfigError: neither the files nor the formula tell.
        """
        target = self.dtype if dtype == "auto" else dtype
        stored = stored_bytes(self.path.parent)
        if stored is None and self.quantized:
            raise ConfigError(f"{self.path}: quantized weights without safetensors files; their size is not known")
        if stored is None:
            return self.parameters * dtype_bytes(target)
        if self.quantized:
            return stored
        return stored * dtype_bytes(target) // dtype_bytes(self.dtype)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number.

    Raises:
        ConfigError: unknown name.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}; known: auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def stored_bytes(folder: Path) -> int | None:
    """Bytes of the safetensors files: `total_size` of their index, else their own sizes; None if there are none."""
    index = read_json(folder / "model.safetensors.index.json")
    if index:
        try:
            return int(index["metadata"]["total_size"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"{folder}/model.safetensors.index.json has no metadata.total_size") from exc
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def read_shape(folder: Path) -> ModelShape:
    """The sizes in a checkpoint's config.json.

    Raises:
        ConfigError: the file is missing, or lacks a field; the message names it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; give a checkpoint folder in Hugging Face format")
    config = read_json(path)

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path}: {key} is {json.dumps(value)}; a whole number of at least 1 is needed")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    return ModelShape(
        path=path,
        family=str(config.get("model_type", "")),
        layers=size("num_hidden_layers"),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=_stored_dtype(config),
        max_context=config.get("max_position_embeddings"),
        quantized="quantization_config" in config,
    )


def _stored_dtype(config: dict[str, Any]) -> str:
    # transformers 5 writes `dtype`, older ones `torch_dtype`.
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
