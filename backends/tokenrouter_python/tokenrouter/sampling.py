"""Chooses the next token of every request of a step, vectorised over the batch.

Order, per row: repetition penalty over prompt and response, then frequency and presence penalties over the response
(discarded tokens never count), bad words, banned ids, min_tokens; then greedy argmax, or temperature, top_k, top_p and
an inverse-CDF draw keyed by (seed, position). Log-probabilities are of the raw logits, before all of that.

Repetition penalty, temperature, top-k and top-p are those of transformers' logits processors; frequency and presence
penalties are OpenAI's (logit -= frequency * count + presence * [count > 0]).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tokenrouter.messages import Sampling
from tokenrouter.rng import Stream, uniform

if TYPE_CHECKING:
    from torch import Tensor

# Below this a temperature is greedy: dividing by it would overflow float32 logits.
GREEDY_TEMPERATURE = 1e-5


class SampledRow(Protocol):
    """What the sampler needs to know of a request."""

    sampling: Sampling
    tokens: list[int]
    prompt_tokens: int
    banned: Sequence[int]

    @property
    def position(self) -> int:
        """Tokens committed so far."""
        ...

    def response_counts(self) -> Counter[int]:
        """Occurrences of token ids in the response."""
        ...

    def seen(self) -> set[int]:
        """Token ids in prompt and response."""
        ...


def is_greedy(sampling: Sampling) -> bool:
    """Whether the token is the argmax."""
    return sampling.temperature <= GREEDY_TEMPERATURE or sampling.top_k == 1


def is_argmax(sampling: Sampling) -> bool:
    """Whether every token is the argmax of the raw logits, but for banned ids."""
    plain = sampling.repetition_penalty == 1.0 and not sampling.presence_penalty and not sampling.frequency_penalty
    return is_greedy(sampling) and plain and not sampling.bad_words and not sampling.min_tokens


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """The next token of each row.

    Args:
        logits: [B, V] float32 raw logits; not changed.
        rows: B requests.

    Returns:
        [B] int64.
    """
    logits = _processed(_common(logits, rows), rows)
    tokens = logits.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if not is_greedy(row.sampling)]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw(logits[index], [rows[i] for i in drawn])
    return tokens


def _common(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """[B, W] without the columns of ids that no row may get; the others' own limits stand in the result as -inf."""
    width = logits.shape[-1]
    limits = [min(row.sampling.vocab_size or width, width) for row in rows]
    widest = max(limits)
    if widest < width:
        logits = logits[:, :widest]
    if min(limits) < widest:
        beyond = torch.arange(widest) >= torch.tensor(limits)[:, None]
        logits = logits.masked_fill(beyond.to(logits.device), float("-inf"))
    return logits


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """[B] float32 natural log-probability of `tokens` [B] under softmax(`logits` [B, V])."""
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _processed(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """[B, V] after penalties and bans; the input itself if no row asks for any."""
    copied = False
    for i, row in enumerate(rows):
        if _is_plain(row):
            continue
        if not copied:
            logits, copied = logits.clone(), True
        _penalise(logits[i], row)
        _ban(logits[i], row)
    return logits


def _is_plain(row: SampledRow) -> bool:
    s = row.sampling
    return (
        s.repetition_penalty == 1.0
        and not s.presence_penalty
        and not s.frequency_penalty
        and not s.bad_words
        and not row.banned
        and (not s.min_tokens or s.min_tokens <= row.position)
    )


def _penalise(logits: Tensor, row: SampledRow) -> None:
    s = row.sampling
    if s.repetition_penalty != 1.0 and (seen := row.seen()):
        ids = torch.tensor(sorted(seen), device=logits.device)
        values = logits[ids]
        logits[ids] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and (counts := row.response_counts()):
        ids = torch.tensor(list(counts), device=logits.device)
        number = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
        logits[ids] -= s.frequency_penalty * number + s.presence_penalty


def _ban(logits: Tensor, row: SampledRow) -> None:
    s = row.sampling
    banned = [word[-1] for word in s.bad_words if _ends_with(row.tokens, row.prompt_tokens, word[:-1])]
    banned.extend(row.banned)
    if row.position < s.min_tokens:
        banned.extend(s.end_ids)
    banned = [token for token in banned if token < logits.shape[-1]]
    if banned:
        logits[torch.tensor(banned, device=logits.device)] = float("-inf")


def _ends_with(tokens: Sequence[int], prompt_tokens: int, suffix: Sequence[int]) -> bool:
    """Whether the response ends with `suffix`; a bad word that begins in the prompt does not count."""
    begin = len(tokens) - len(suffix)
    return begin >= prompt_tokens and all(tokens[begin + i] == token for i, token in enumerate(suffix))


def _draw(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """[R] int64 by inverse CDF over tokens sorted by falling probability; one uniform number a row."""
    device = logits.device
    temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float64, device=device)
    ranked, ids = torch.sort(logits.double() / temperature[:, None], dim=-1, descending=True, stable=True)
    width = ranked.shape[-1]
    top_k = torch.tensor([row.sampling.top_k or width for row in rows], device=device)
    rank = torch.arange(width, device=device)
    p = torch.softmax(ranked.masked_fill(rank[None] >= top_k[:, None], float("-inf")), dim=-1)
    cumulative = p.cumsum(-1)
    # The token that crosses top_p belongs to the nucleus: drop those whose predecessors already reach it.
    # 1 is no limit, whatever the cumulative sum rounds to.
    limits = [row.sampling.top_p if row.sampling.top_p < 1.0 else 2.0 for row in rows]
    top_p = torch.tensor(limits, dtype=torch.float64, device=device)
    p = p.masked_fill(cumulative - p >= top_p[:, None], 0.0)
    cumulative = p.cumsum(-1)
    u = torch.from_numpy(uniform([r.sampling.seed for r in rows], [r.position for r in rows], Stream.SAMPLING))
    target = u.to(device)[:, None] * cumulative[:, -1:]
    choice = (cumulative <= target).sum(-1, keepdim=True)
    # Without any p > 0 (everything banned, logits that overflowed) the likeliest token; never an error for the others.
    last = ((p > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return ids.gather(-1, torch.minimum(choice, last))[:, 0]
