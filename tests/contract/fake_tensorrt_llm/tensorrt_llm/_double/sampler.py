"""The default sampler: greedy, or temperature, top-k and top-p; of the rest only bias and min_tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm import _behaviour


class TorchSampler:
    """Draws from one generator for all requests; seeds of requests are ignored."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(torch.seed() % 2**63)

    def sample(self, logits: Tensor, params: Any, prompt: Sequence[int], generated: Sequence[int]) -> int:
        """The next token for one row of logits, [V] float32."""
        logits = logits.float().clone()
        if params.embedding_bias is not None:
            logits += params.embedding_bias
        if params.min_tokens and len(generated) < params.min_tokens and params.end_id is not None:
            logits[params.end_id] = float("-inf")
        self._ignored(logits, params, prompt, generated)
        if params.greedy:
            return int(logits.argmax())
        return self._draw(logits, params, len(generated))

    def _draw(self, logits: Tensor, params: Any, position: int) -> int:
        logits = logits / (1.0 if params.temperature is None else params.temperature)
        ranked, ids = logits.sort(descending=True)
        if params.top_k:
            ranked = ranked[: params.top_k]
        p = ranked.softmax(-1)
        if params.top_p is not None:
            p[p.cumsum(-1) - p >= params.top_p] = 0
        generator = self._generator
        if params.seed is not None and not _behaviour.true("ignores_seed"):
            generator = torch.Generator().manual_seed(params.seed * 1000 + position)
        return int(ids[torch.multinomial(p.cpu(), 1, generator=generator)])

    def _ignored(self, logits: Tensor, params: Any, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """What this sampler does only where a test breaks its ignorance."""
        if not _behaviour.true("ignores_penalties"):
            if params.repetition_penalty:
                ids = torch.tensor(sorted({*prompt, *generated}))
                logits[ids] = torch.where(
                    logits[ids] > 0, logits[ids] / params.repetition_penalty, logits[ids] * params.repetition_penalty
                )
            for token, count in Counter(generated).items():
                logits[token] -= (params.presence_penalty or 0) + count * (params.frequency_penalty or 0)
        if not _behaviour.true("ignores_bad_words") and params.bad_token_ids:
            logits[torch.tensor(params.bad_token_ids)] = float("-inf")
        if not _behaviour.true("ignores_min_p") and params.min_p:
            p = logits.softmax(-1)
            logits[p < params.min_p * p.max()] = float("-inf")
