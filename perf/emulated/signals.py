"""Signals at given rates for emulated models, and small routers that read them; so the real policies decide.

R-Stitch reads the entropy of the logits. R2R, CITER and Co-LLM read hidden states through a network in a file: these
files are of the policies' own formats and layers, of the emulated models' width, with weights such that the decision
follows the first hidden coordinate (+1 unsure, -1 sure). Everything that a trained router costs the server is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from perf.emulated.repository import VOCAB_SIZE
from tokenrouter.policies.checkpoints import DEFAULT_FOLDER, RouterFile, save_router

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
    """Engine options by model.

    Args:
        leave_rate: how often a policy leaves the small model, per position that it writes or tries to.
        return_rate: how often it leaves the large one; only R-Stitch asks there.
        names: of the small and the large model.
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
        return RouterFile("collm", {"deferral.weight": _first(1, hidden_size)[0] * _STEEP}, threshold=0.5)
    args = {"model_type": "HiddenStatesTokenLMHeadLogitsClassifier", "normalize_input": False}
    return RouterFile("r2r", _r2r(hidden_size, vocab_size), threshold=0.5, args=args)


def _first(rows: int, columns: int) -> torch.Tensor:
    """Zeros, but the first input goes to the first output."""
    weight = torch.zeros(rows, columns)
    weight[0, 0] = 1.0
    return weight


def _citer(hidden: int) -> dict[str, torch.Tensor]:
    """Score near 1 where the small model is sure: the first unit is relu(-h_0), the last layer shifts it by 1/2."""
    middle = 2 * hidden
    last = _first(1, hidden) * 2 * _STEEP
    return {
        "mlp.0.weight": -_first(middle, hidden),
        "mlp.0.bias": torch.zeros(middle),
        "mlp.1.weight": torch.ones(middle),
        "mlp.1.bias": torch.zeros(middle),
        "mlp.1.running_mean": torch.zeros(middle),
        "mlp.1.running_var": torch.ones(middle),
        "mlp.4.weight": _first(hidden, middle),
        "mlp.4.bias": torch.zeros(hidden),
        "linear.weight": last,
        "linear.bias": torch.full((1,), -_STEEP),
    }


def _r2r(hidden: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """h_0 goes through every layer; the last norm keeps its sign, because all other coordinates are equal."""
    tensors = {"token_embeddings.weight": torch.zeros(vocab_size, _EMBEDDING)}

    def linear(name: str, weight: torch.Tensor) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = weight, torch.zeros(weight.shape[0])

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(hidden), torch.zeros(hidden)

    linear("logits_projection", torch.zeros(hidden, min(_TOP_LOGITS, vocab_size)))
    linear("combined_projection", _first(hidden, 2 * hidden + _EMBEDDING))
    linear("backbone.input_projection", torch.eye(hidden))
    for block in range(2):
        norm(f"backbone.blocks.{block}.layer_norm")
        linear(f"backbone.blocks.{block}.mlp.0", _first(4 * hidden, hidden))
        linear(f"backbone.blocks.{block}.mlp.3", torch.zeros(hidden, 4 * hidden))
    norm("backbone.output_layer.0")
    linear("backbone.output_layer.1", _first(1, hidden) * _STEEP)
    return tensors
