"""Engines execute forward passes: `torch` and `emulated` step by step, `tensorrt_llm` in a loop of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenrouter.engines.base import Engine, LoopEngine, Placement
from tokenrouter.errors import ConfigError


def load_engine(
    name: str, checkpoint: Path, options: dict[str, Any], *, sharing: int = 1, placement: Placement | None = None
) -> Engine | LoopEngine:
    """Loads an engine by name; it is imported only now.

    Args:
        name: ``torch``, ``tensorrt_llm`` or ``emulated``.
        checkpoint: folder in Hugging Face format.
        options: the engine's own part of model.yaml.
        sharing: how many engines share this machine's cores; each takes its part unless `threads` says otherwise.
        placement: whose model this is; only `tensorrt_llm`, where the router runs inside the engine, looks at it.

    Raises:
        ConfigError: unknown engine, or whatever the engine refuses.
    """
    if name == "torch":
        from tokenrouter.engines.torch.config import TorchEngineConfig
        from tokenrouter.engines.torch.engine import TorchEngine

        return TorchEngine.from_folder(checkpoint, TorchEngineConfig.from_mapping(options), sharing=sharing)
    if name == "emulated":
        from tokenrouter.engines.emulated.engine import EmulatedEngine

        return EmulatedEngine.from_folder(checkpoint, options)
    if name == "tensorrt_llm":
        from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
        from tokenrouter.engines.tensorrt_llm.engine import TensorRtLlmEngine

        config = TensorRtLlmConfig.from_mapping(checkpoint, options)
        return TensorRtLlmEngine(checkpoint, config, placement or Placement())
    raise ConfigError(f"unknown engine {name!r}; known: torch, tensorrt_llm, emulated")
