"""The two models that a router is trained for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.engines.torch.loading import load_model


@dataclass(frozen=True)
class Pair:
    """Two checkpoint folders and how they run.

    Attributes:
        small, large: folders in Hugging Face format with one tokenizer.
        device, dtype: as in `TorchEngineConfig`.
    """

    small: Path
    large: Path
    names: tuple[str, str] = ("small", "large")
    batch: int = 64
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def config(self) -> TorchEngineConfig:
        return TorchEngineConfig(
            device=self.device, dtype=self.dtype, max_batch_size=self.batch, max_num_tokens=max(2048, self.batch)
        )


@contextmanager
def engine_of(folder: Path, pair: Pair) -> Iterator[TorchEngine]:
    """An engine for decoding, freed at the end."""
    engine = TorchEngine.from_folder(folder, pair.config())
    try:
        yield engine
    finally:
        engine.shutdown()
        gc.collect()


@contextmanager
def model_of(folder: Path, pair: Pair) -> Iterator[Any]:
    """The plain Hugging Face model, for prefills with all positions."""
    config = pair.config()
    device = config.resolve_device()
    yield load_model(folder, dtype=config.resolve_dtype(device), device=device)
    gc.collect()


def input_embedding(folder: Path) -> Tensor:
    """[V, E] input embedding of the model in a folder."""
    return _weight(folder, "get_input_embeddings")


def output_embedding(folder: Path) -> Tensor:
    """[V, H] LM head of the model in a folder."""
    return _weight(folder, "get_output_embeddings")


def _weight(folder: Path, getter: str) -> Tensor:
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    weight: Tensor = getattr(model, getter)().weight.detach()
    return weight
