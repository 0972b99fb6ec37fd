"""The networks as torch modules whose state dicts are the sources' checkpoints, name for name.

Sources: thu-nics/R2R, r2r/models/router.py (class HiddenStatesTokenLMHeadLogitsClassifier); aiming-lab/CITER,
src/models/conf_model.py; clinicalml/co-llm, collm/training (the row alone). Inference in the server is
`tokenrouter.policies.checkpoints`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

R2R_CLASS = "HiddenStatesTokenLMHeadLogitsClassifier"


class Block(nn.Module):
    """y = r + MLP(LayerNorm(x)), with r = x, or a linear map of it where the sizes differ."""

    def __init__(self, inputs: int, outputs: int, expansion: int, dropout: float) -> None:
        super().__init__()
        inner = inputs * expansion
        self.layer_norm = nn.LayerNorm(inputs)
        self.mlp = nn.Sequential(
            nn.Linear(inputs, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, outputs), nn.Dropout(dropout)
        )
        self.dim_change = nn.Linear(inputs, outputs) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] -> [B, outputs]."""
        kept: Tensor = x if self.dim_change is None else self.dim_change(x)
        changed: Tensor = self.mlp(self.layer_norm(x))
        return kept + changed


class Backbone(nn.Module):
    """A projection, one block per entry of `sizes` (block i maps sizes[i] to sizes[i + 1]), a norm and one output."""

    def __init__(self, inputs: int, sizes: Sequence[int], expansion: int, dropout: float) -> None:
        super().__init__()
        self.input_projection = nn.Linear(inputs, sizes[0])
        following = [*sizes[1:], sizes[-1]]
        self.blocks = nn.ModuleList(
            Block(size, after, expansion, dropout) for size, after in zip(sizes, following, strict=True)
        )
        self.output_layer = nn.Sequential(nn.LayerNorm(sizes[-1]), nn.Linear(sizes[-1], 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] -> [B]."""
        x = self.input_projection(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.output_layer(x)
        return output[:, 0]


class R2RClassifier(nn.Module):
    """R2R's class of all shipped configurations, without the frozen token embedding.

    Args:
        hidden, token, logits: H, E and K, widths of the inputs.
        sizes: of the backbone; the source's is six times 1024.
        expansion, dropout: of its blocks; the source has 4 and 0.1.
    """

    def __init__(
        self, hidden: int, token: int, logits: int, sizes: Sequence[int], expansion: int, dropout: float
    ) -> None:
        super().__init__()
        self.logits_projection = nn.Linear(logits, hidden)
        self.combined_projection = nn.Linear(2 * hidden + token, sizes[0])
        self.backbone = Backbone(sizes[0], sizes, expansion, dropout)

    def forward(self, hidden: Tensor, token: Tensor, logits: Tensor) -> Tensor:
        """[B, H], [B, E], [B, K] float32 -> [B], the logit of "divergent"."""
        combined = torch.cat([hidden, token, self.logits_projection(logits)], dim=-1)
        output: Tensor = self.backbone(self.combined_projection(combined))
        return output


class CiterClassifier(nn.Module):
    """CITER's network; no activation stands between its last two layers, as in the source."""

    def __init__(self, hidden: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 2 * hidden),
            nn.BatchNorm1d(2 * hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * hidden, hidden),
            nn.Dropout(dropout),
        )
        self.linear = nn.Linear(hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, H] float32 -> [B], the logit of "the small model is good enough"."""
        output: Tensor = self.linear(self.mlp(hidden))
        return output[:, 0]


class DeferralRowModule(nn.Module):
    """Co-LLM's row g alone; `start` is its first value [H], in the source the mean of the output embedding."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.deferral = nn.Linear(len(start), 1, bias=False)
        with torch.no_grad():
            self.deferral.weight.copy_(start[None])

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, H] float32 -> [B], the logit of "defer"."""
        output: Tensor = self.deferral(hidden)
        return output[:, 0]


class WinRateClassifier(nn.Module):
    """Our query classifier: the mean of hashed words' rows, and a logistic unit (`checkpoints.win_rate.Classifier`)."""

    def __init__(self, buckets: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(buckets, width, mode="mean")
        self.output = nn.Linear(width, 1)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        """Bucket ids [N] of all texts, where each text begins [B] -> [B], the logit of "the large model wins"."""
        output: Tensor = self.output(self.embedding(words, offsets))
        return output[:, 0]
