"""The networks as torch modules whose state dicts are the sources' checkpoints, name for name.

Sources: thu-nics/R2R, r2r/models/router.py (class HiddenStatesTokenLMHeadLogitsClassifier); aiming-lab/CITER,
src/models/conf_model.py; clinicalml/co-llm, collm/training (the row alone). Inference in the server is
`tokenrouter.policies.checkpoints`; a test compares the two.
"""

from __future__ import annotations

from collections import OrderedDict
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


def backbone(inputs: int, sizes: Sequence[int], expansion: int, dropout: float) -> nn.Sequential:
    """[B, inputs] -> [B]: a projection, one block per entry of `sizes`, a norm and one output.

    Block i maps sizes[i] to sizes[i + 1]. Equal seeds give equal weights: the order of construction counts.
    """
    following = [*sizes[1:], sizes[-1]]
    return _named(
        input_projection=nn.Linear(inputs, sizes[0]),
        blocks=nn.Sequential(
            *(Block(size, after, expansion, dropout) for size, after in zip(sizes, following, strict=True))
        ),
        output_layer=nn.Sequential(nn.LayerNorm(sizes[-1]), nn.Linear(sizes[-1], 1)),
    )


def _named(**parts: nn.Module) -> nn.Sequential:
    """The parts one after the other under their names, and from one output per row a vector."""
    return nn.Sequential(OrderedDict(**parts, vector=nn.Flatten(0)))


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
        self.backbone = backbone(sizes[0], sizes, expansion, dropout)

    def forward(self, hidden: Tensor, token: Tensor, logits: Tensor) -> Tensor:
        """[B, H], [B, E], [B, K] float32 -> [B], the logit of "divergent"."""
        combined = torch.cat([hidden, token, self.logits_projection(logits)], dim=-1)
        output: Tensor = self.backbone(self.combined_projection(combined))
        return output


def citer_classifier(hidden: int, dropout: float = 0.1) -> nn.Sequential:
    """[B, H] float32 -> [B], the logit of "the small model is good enough".

    No activation stands between the last two layers, as in the source.
    """
    mlp = nn.Sequential(
        nn.Linear(hidden, 2 * hidden),
        nn.BatchNorm1d(2 * hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(2 * hidden, hidden),
        nn.Dropout(dropout),
    )
    return _named(mlp=mlp, linear=nn.Linear(hidden, 1))


def deferral_row(start: Tensor) -> nn.Sequential:
    """Co-LLM's row g alone: [B, H] float32 -> [B], the logit of "defer".

    Args:
        start: [H], its first value, in the source the mean of the output embedding.
    """
    row = nn.Linear(len(start), 1, bias=False)
    with torch.no_grad():
        row.weight.copy_(start[None])
    return _named(deferral=row)


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
