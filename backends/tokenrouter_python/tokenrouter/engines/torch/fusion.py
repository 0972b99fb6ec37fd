"""Replaces modules by equivalents with fewer operators: in small models a step is mostly the calling of operators."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

# Largest difference, relative to the largest output, that rounding explains.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replaces RMS norms, written as eight operators in transformers, by torch's single one; returns how many.

    Names prove nothing (some norms scale by 1 + weight, some take a gate), so a norm is replaced only if both give the
    same output.
    """
    fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _fused_norm(child)
            if replacement is not None:
                setattr(parent, name, replacement)
                fused += 1
    return fused


def _fused_norm(norm: Any) -> nn.RMSNorm | None:
    """The one-operator equivalent of `norm`, or None if it is no plain RMS norm."""
    eps = getattr(norm, "variance_epsilon", None)
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(eps, float) or _hooked(norm):
        return None
    weight = getattr(norm, "weight", None)
    if (
        not isinstance(weight, nn.Parameter)
        or weight.dim() != 1
        or len(inspect.signature(norm.forward).parameters) != 1
    ):
        return None
    fused = nn.RMSNorm(weight.shape[0], eps=eps, device="meta")
    fused.weight = weight
    return fused.eval() if _same(norm, fused, weight) else None


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _same(norm: nn.Module, fused: nn.Module, weight: nn.Parameter) -> bool:
    """Whether both map values of very different size to the same output."""
    sample = torch.randn((4, len(weight)), generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1e-3, 1.0, 30.0, 1e-1])[:, None]
    inputs = (sample * scales).to(device=weight.device, dtype=weight.dtype)
    want, got = norm(inputs).float(), fused(inputs).float()
    allowed = _TOLERANCES.get(weight.dtype, 0.0) * want.abs().max()
    return bool((want - got).abs().max() <= allowed)
