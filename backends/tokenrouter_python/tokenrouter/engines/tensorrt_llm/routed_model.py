"""Model classes with a router inside, for TensorRT-LLM's model registry: see `engines.graph_router`.

Each is the stock class of an architecture, with the router behind its last norm. The engine's workers find a class by
reference, as an attribute of this module, and its settings in the environment.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenrouter.checkpoint import read_json
from tokenrouter.engines.tensorrt_llm import facts
from tokenrouter.engines.tensorrt_llm.graph_router import GraphRouter, RouterSettings
from tokenrouter.errors import ConfigError

# TensorRT-LLM hands variables with this prefix on to workers that it spawns.
SETTINGS_VARIABLE = "TLLM_TOKENROUTER_ROUTER"
_MODELING = "tensorrt_llm._torch.models.modeling_utils"


@contextmanager
def registered(checkpoint: Path, settings: RouterSettings | None) -> Iterator[None]:
    """While this is open, the checkpoint's architecture loads with the router; nothing happens without settings.

    Raises:
        ConfigError: hidden states are not known for the architecture.
    """
    if settings is None:
        yield
        return
    architecture = str((read_json(checkpoint / "config.json").get("architectures") or [""])[0])
    if architecture not in facts.STOCK_MODELS:
        raise ConfigError(
            f"policy {settings.policy.name!r} needs hidden states; in TensorRT-LLM they are known for architectures "
            f"{', '.join(facts.STOCK_MODELS)}, not for {architecture!r}"
        )
    register = importlib.import_module(_MODELING).register_auto_model
    routed = __getattr__(architecture)
    register(architecture)(routed)
    os.environ[SETTINGS_VARIABLE] = msgspec.json.encode(settings).decode()
    try:
        yield
    finally:
        del os.environ[SETTINGS_VARIABLE]
        register(architecture)(routed.__mro__[1])


def __getattr__(name: str) -> type:
    """The class with a router for an architecture."""
    if name not in facts.STOCK_MODELS:
        raise AttributeError(name)
    cls = globals()[name] = _routed(getattr(importlib.import_module(facts.STOCK_MODELS[name]), name))
    return cls


def _routed(stock: Any) -> type:
    class Routed(stock):  # type: ignore[misc]
        """The stock class with a router behind its last norm."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=RouterSettings)
            self._router: GraphRouter | None = None

        def forward(
            self,
            attn_metadata: Any,
            input_ids: Any = None,
            position_ids: Any = None,
            inputs_embeds: Any = None,
            return_context_logits: bool = False,
            **kwargs: Any,
        ) -> Any:
            """Logits of last positions, float32, with marks."""
            tokens = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
            if return_context_logits:
                return super().forward(attn_metadata, **tokens, return_context_logits=True, **kwargs)
            hidden = self.model(attn_metadata=attn_metadata, **tokens, **kwargs)
            hidden = hidden[torch.cumsum(attn_metadata.seq_lens_cuda, dim=0, dtype=torch.long) - 1]
            logits = self.lm_head(hidden).float()
            if self._router is None:
                # Not in __init__, where weights have no memory yet; the engine's warm-up comes before its graphs.
                table = getattr(getattr(self.model, "embed_tokens", None), "weight", None)
                # Tensor parallelism may have split it.
                whole = table is not None and len(table) >= self.config.vocab_size
                self._router = GraphRouter(
                    self._settings, embedding=table if whole else None, device=str(logits.device)
                )
            return self._router(logits, hidden)

    Routed.__name__ = Routed.__qualname__ = stock.__name__
    Routed.__module__ = __name__
    return Routed
