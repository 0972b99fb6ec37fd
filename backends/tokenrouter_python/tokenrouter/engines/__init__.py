"""Engines execute forward passes inside a subserver: `torch`, `emulated`, and whatever implements `base.Engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenrouter.engines.base import Engine
from tokenrouter.errors import ConfigError


def load_engine(name: str, checkpoint: Path, options: dict[str, Any], *, sharing: int = 1) -> Engine:
    """Loads an engine by name; it is imported only now.

    Args:
        name: ``torch`` or ``emulated``.
        checkpoint: folder in Hugging Face format.
        options: the engine's own part of model.yaml.
        sharing: how many engines share this machine's cores; each takes its part unless `threads` says otherwise.

    Raises:
        ConfigError: unknown engine, or whatever the engine refuses.
    """
    if name == "torch":
        from tokenrouter.engines.torch import TorchEngine, TorchEngineConfig

        return TorchEngine.from_folder(checkpoint, TorchEngineConfig.from_mapping(options), sharing=sharing)
    if name == "emulated":
        from tokenrouter.engines.emulated import EmulatedEngine

        return EmulatedEngine.from_folder(checkpoint, options)
    raise ConfigError(f"unknown engine {name!r}; known: torch, emulated")
