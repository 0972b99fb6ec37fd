"""Engines execute forward passes: `torch` and `emulated` step by step, `tensorrt_llm` in a loop of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenrouter.engines.base import Engine, LoopEngine, Placement
from tokenrouter.errors import ConfigError


def load_engine(name: str, checkpoint: Path, options: dict[str, Any], *, sharing: int = 1) -> Engine:
    """Loads a stepped engine by name; it is imported only now.

    Args:
        name: ``torch`` or ``emulated``.
        checkpoint: folder in Hugging Face format.
        options: the engine's own part of model.yaml.
        sharing: how many engines share this machine's cores; each takes its part unless `threads` says otherwise.

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
    raise ConfigError(f"unknown engine {name!r}; known: torch, tensorrt_llm, emulated")


def load_tensorrt_llm(checkpoint: Path, options: dict[str, Any], placement: Placement) -> LoopEngine:
    """Loads the engine that owns its loop; it is imported only now.

    Args:
        checkpoint: folder in Hugging Face format.
        options: the engine's own part of model.yaml.
        placement: whose model this is, since the router runs inside the engine.

    Raises:
        ConfigError: whatever the engine refuses.
    """
    from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
    from tokenrouter.engines.tensorrt_llm.engine import TensorRtLlmEngine

    return TensorRtLlmEngine(checkpoint, TensorRtLlmConfig.from_mapping(checkpoint, options), placement)
