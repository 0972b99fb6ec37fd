"""Prompts with their answers as batches, and what a model makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Text = tuple[Tensor, Tensor]
"""Token ids of a prompt [p] and of its answer [n]."""


@dataclass(frozen=True)
class Batch:
    """A right-padded batch of texts whose answers have n tokens together.

    Attributes:
        input_ids: [B, length].
        predicts: [B, length] bool, n of them true: where the next token is one of an answer.
        tokens: [n], the answers' tokens.
    """

    input_ids: Tensor
    predicts: Tensor
    tokens: Tensor


def pack(texts: Sequence[Text]) -> Batch:
    """One batch of these texts, in their order."""
    width = max(len(prompt) + len(answer) for prompt, answer in texts) - 1
    input_ids = torch.zeros((len(texts), width), dtype=torch.long)
    predicts = torch.zeros((len(texts), width), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(texts):
        ids = torch.cat([prompt, answer])[:-1]
        input_ids[row, : len(ids)] = ids
        predicts[row, len(prompt) - 1 : len(ids)] = True
    return Batch(input_ids, predicts, torch.cat([answer for _, answer in texts]).long())


def hidden_of(model: Any, batch: Batch) -> Tensor:
    """[n, H] states after the final norm, from which the answers' tokens are predicted."""
    # No attention mask: padding is on the right, where no position that counts looks.
    hidden: Tensor = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state[batch.predicts]
    return hidden


@dataclass(frozen=True)
class Fit:
    """How well a model knows texts: share of tokens that it would have chosen, and perplexity."""

    agreement: float
    perplexity: float


@torch.inference_mode()
def fit_of(model: Any, texts: Sequence[Text], size: int = 8) -> Fit:
    """What a model says of the answers in texts, `size` of them at a time."""
    right, surprise, count = 0, 0.0, 0
    for start in range(0, len(texts), size):
        batch = pack(texts[start : start + size])
        logits = model.lm_head(hidden_of(model, batch)).float()
        right += int((logits.argmax(-1) == batch.tokens).sum())
        surprise += float(functional.cross_entropy(logits, batch.tokens, reduction="sum"))
        count += len(batch.tokens)
    return Fit(right / count, math.exp(surprise / count))
