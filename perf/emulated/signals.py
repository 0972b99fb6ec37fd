"""Signals at given rates for emulated models, and small routers that read them; so the real policies decide.

R-Stitch reads the entropy of the logits. R2R, CITER and Co-LLM read hidden states through a network in a file: these
files are of the policies' own formats and layers, of the emulated models' width, with weights such that the decision
follows the first hidden coordinate (+1 unsure, -1 sure). Everything that a trained router costs the server is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from perf.emulated.repository import VOCAB_SIZE
from tokenrouter.policies.checkpoints import DEFAULT_FOLDER, RouterFile, save_router
from tools.train_router.networks import R2R_CLASS, R2RClassifier, citer_classifier

HIDDEN_SIZE = 8
ROUTED_BY_FILE = ("r2r", "citer", "collm")
ROUTED_BY_SIGNALS = (*ROUTED_BY_FILE, "rstitch")

# Far from 0.5 in probability, and from every threshold in use (0.15 to 0.98).
_STEEP = 10.0
_TOP_LOGITS = 100
_EMBEDDING = 4


def signal_options(
    leave_rate: float, return_rate: float = 1.0, *, names: tuple[str, ...] = ("small", "large")
) -> dict[str, dict[str, Any]]:
    """Engine options by model, the small one first.

    A policy leaves the small model at this rate, per position that it writes or tries to, and the large one at the
    other; only R-Stitch asks there.
    """
    shares = zip(names, (leave_rate, 1.0 - return_rate), strict=True)
    return {name: {"signals": {"unsure": share, "stream": i}} for i, (name, share) in enumerate(shares)}


def write_router(
    repository: Path, policy: str, *, vocab_size: int = VOCAB_SIZE, hidden_size: int = HIDDEN_SIZE
) -> None:
    """Writes the policy's router to where a deployment's own is looked for; nothing for a policy without one."""
    if policy in ROUTED_BY_FILE:
        path = repository / DEFAULT_FOLDER / f"{policy}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_router(router_file(policy, vocab_size=vocab_size, hidden_size=hidden_size), path)


def router_file(policy: str, *, vocab_size: int, hidden_size: int = HIDDEN_SIZE) -> RouterFile:
    """The router of a policy in `ROUTED_BY_FILE`."""
    if policy == "citer":
        return RouterFile("citer", _citer(hidden_size), threshold=0.5)
    if policy == "collm":
        return RouterFile("collm", {"deferral.weight": _STEEP * torch.eye(hidden_size)[0]}, threshold=0.5)
    args = {"model_type": R2R_CLASS, "normalize_input": False}
    return RouterFile("r2r", _r2r(hidden_size, vocab_size), threshold=0.5, args=args)


def _r2r(hidden: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """The last norm keeps the sign of the first coordinate, because all others are equal."""
    module = R2RClassifier(hidden, _EMBEDDING, min(_TOP_LOGITS, vocab_size), (hidden, hidden), 4, 0.0)
    passing = ("combined_projection.weight", "backbone.input_projection.weight")
    weights = {**dict.fromkeys(passing, 1.0), "backbone.output_layer.1.weight": _STEEP}
    return {"token_embeddings.weight": torch.zeros(vocab_size, _EMBEDDING), **_tensors(module, weights)}


def _citer(hidden: int) -> dict[str, torch.Tensor]:
    """Score near 1 where the small model is sure: the first unit is relu(-h_0), the last layer shifts it by 1/2."""
    weights = {"mlp.0.weight": -1.0, "mlp.4.weight": 1.0, "linear.weight": 2 * _STEEP, "linear.bias": -_STEEP}
    return _tensors(citer_classifier(hidden), weights)


def _tensors(module: nn.Module, weights: dict[str, float]) -> dict[str, torch.Tensor]:
    """The module's tensors: linear layers are zero, but for weights from the first input to the first output."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    tensors: dict[str, torch.Tensor] = module.state_dict()
    for name, weight in weights.items():
        tensors[name].view(-1)[0] = weight
    return tensors
