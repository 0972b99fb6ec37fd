"""Made-up models: next-token logits that follow from the model's name and the token history, and from nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class MadeUp:
    """A `rows.World`.

    Attributes:
        widths: V by model.
        bias: added to the logits of single ids, at every model.
        scale: of the normal logits.
        seed: another one, another world.
    """

    widths: Mapping[str, int]
    bias: Mapping[int, float] = field(default_factory=dict)
    scale: float = 1.0
    seed: int = 0

    def __call__(self, model: str, tokens: Sequence[int]) -> Tensor:
        """[V] float32."""
        text = f"{self.seed} {model} {list(tokens)}".encode()
        g = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))
        logits = torch.randn(self.widths[model], generator=g) * self.scale
        for token, more in self.bias.items():
            logits[token] += more
        return logits
