"""aiming-lab/CITER: the confidence network, src/models/conf_model.py."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from perf.reference_routers import imports
from perf.reference_routers.rows import Finding, decisions, largest
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import PolicyContext
from tokenrouter.policies.checkpoints.citer import load_citer

SOURCE = "CITER"
_REQUESTS, _POSITIONS = 40, 50


def compare(source: Path, folder: Path) -> Iterator[Finding]:
    """Networks of several widths."""
    imports.at(source)
    build = importlib.import_module("src.models.conf_model").ConfidenceModel
    for hidden in (8, 64, 896):
        yield _compared(build, hidden, folder / f"mlp_iter_{hidden}.pth")


def _compared(build: Any, size: int, path: Path) -> Finding:
    g = torch.Generator().manual_seed(size)
    model = build(SimpleNamespace(hidden_size=size, pad_token_id=None, eos_token_id=0)).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=g) * 0.1)
        norm = model.mlp[1]
        norm.running_mean.copy_(torch.randn(norm.running_mean.shape, generator=g))
        norm.running_var.copy_(torch.rand(norm.running_var.shape, generator=g) + 0.5)
        torch.save(model.state_dict(), path)
        hidden = torch.randn(_REQUESTS, _POSITIONS, size, generator=g)
        theirs = model(hidden)[..., 0]
    threshold = float(theirs.median()) + 1e-4
    params = msgspec.json.encode({"checkpoint": path.name, "threshold": threshold}).decode()
    policy = load_policy(PolicySpec("citer", params), PolicyContext(("small", "large"), str(path.parent)))
    tokens = torch.zeros(_REQUESTS, _POSITIONS, dtype=torch.long)
    got = decisions(policy, torch.zeros(_REQUESTS, _POSITIONS, 4), hidden, tokens)
    ours = load_citer(path).score(hidden.flatten(0, 1))
    different = int((got != (theirs < threshold)).sum())
    return Finding(
        SOURCE, "ConfidenceModel", f"hidden size {size}", len(ours), largest(ours, theirs.flatten()), different
    )
