"""Measures of uncertainty on next-token logits, vectorised over the batch. Torch methods only; nothing is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, at temperature 1.

    Args:
        logits: [B, V] float32.

    Returns:
        [B] float32. p ln p counts as 0 at p = 0, where the plain product is NaN.
    """
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)


def evidence(logits: Tensor, top: int = 10) -> tuple[Tensor, Tensor]:
    """Aleatoric and epistemic uncertainty of a Dirichlet whose evidence is the `top` largest raw logits.

    With x the top logits and S their sum: aleatoric = -sum (x/S) (digamma(x + 1) - digamma(S + 1)), epistemic =
    top / (S + top). Source: R2R (thu-nics/R2R, r2r/utils/switching.py). Only meaningful for positive logits.

    Args:
        logits: [B, V] float32.
        top: how many logits count.

    Returns:
        two [B] float32.
    """
    x = logits.topk(min(top, logits.shape[-1]), dim=-1).values
    total = x.sum(-1, keepdim=True)
    aleatoric = -(x / total * ((x + 1).digamma() - (total + 1).digamma())).sum(-1)
    return aleatoric, x.shape[-1] / (total[:, 0] + x.shape[-1])
