"""What a model thinks at every position of given texts: one prefill, all positions kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenrouter.engines.torch.loading import split

# Largest batch of a prefill, in tokens with padding.
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Text:
    """A prompt and what follows it, as token ids; the end id belongs to the answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Features:
    """One row per answer token: what the model gave at the position that predicts it. T rows, text after text.

    Attributes:
        hidden: [T, H] in the model's dtype, the vector fed to the LM head (after the final norm).
        top_logits: [T, K] float32, the K largest raw logits, falling.
        token: [T] int64, the argmax.
    """

    hidden: Tensor
    top_logits: Tensor
    token: Tensor


@torch.inference_mode()
def read(model: Any, texts: Sequence[Text], top: int, progress: Callable[[int], None] = lambda done: None) -> Features:
    """Prefills all texts.

    Args:
        model: a Hugging Face causal LM with its own attention.
        texts: what it reads; both parts at least one token.
        top: K, how many logits are kept (R2R: 100); fewer if the vocabulary is smaller.
    """
    decoder, head = split(model)
    rows: list[Features | None] = [None] * len(texts)
    for batch in _batches(texts):
        ids = [torch.tensor(texts[i].prompt + texts[i].answer[:-1]) for i in batch]
        # Padding on the right: with causal attention nobody sees it.
        inputs = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(model.device)
        mask = (torch.arange(inputs.shape[1])[None] < torch.tensor([len(row) for row in ids])[:, None]).to(model.device)
        states = decoder(input_ids=inputs, attention_mask=mask, use_cache=False).last_hidden_state
        for row, i in enumerate(batch):
            hidden = states[row, len(texts[i].prompt) - 1 : len(ids[row])]
            logits = head(hidden).float()
            best = logits.topk(min(top, logits.shape[-1]), dim=-1).values
            rows[i] = Features(hidden.cpu(), best.cpu(), logits.argmax(-1).cpu())
        progress(len(batch))
    done = [row for row in rows if row is not None]
    return Features(*(torch.cat([getattr(row, name) for row in done]) for name in ("hidden", "top_logits", "token")))


def _batches(texts: Sequence[Text]) -> Iterator[list[int]]:
    """Indices of texts of similar length, at most `_BATCH_TOKENS` tokens together (or one text)."""
    batch: list[int] = []
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i].prompt) + len(texts[i].answer)):
        if batch and (len(batch) + 1) * (len(texts[i].prompt) + len(texts[i].answer)) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """[T, E] float32 rows of an input embedding [V, E] for ids [T]."""
    return functional.embedding(tokens, table).float()
