"""Labels from texts, greedy tokens of both models and continuations. Pure: no model runs here.

Sources of the rules: thu-nics/R2R, script/data_labeling and resource/ (divergence), aiming-lab/CITER, src/pipeline
(sufficiency), clinicalml/co-llm, collm/training (deferral), lm-sys/RouteLLM (win).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

UNUSABLE = -1
_SENTENCE_END = re.compile(r"[.!?\n]\s*$")
_INSIGNIFICANT = re.compile(r"[\W_]+")


def mismatches(small: Tensor, target: Tensor, end_ids: Collection[int]) -> Tensor:
    """[M] int64 rows where the small model's choice differs from the text, which does not end there (R2R).

    Args:
        small: [T] int64, the small model's argmax.
        target: [T] int64, the text's token.
    """
    ends = torch.isin(target, torch.tensor(sorted(end_ids), dtype=target.dtype))
    return ((small != target) & ~ends).nonzero()[:, 0]


def divergent(rows: int, index: Tensor, verdicts: Sequence[bool | None]) -> Tensor:
    """R2R: 1 where the continuation from the small model's token goes wrong, 0 elsewhere.

    Args:
        index: [M] the judged rows.
        verdicts: M times: whether the continuation diverges; None = cannot tell.

    Returns:
        [T] int8 with 1, 0 and `UNUSABLE`.
    """
    return _judged(torch.zeros(rows, dtype=torch.int8), index, verdicts)


def _judged(labels: Tensor, index: Tensor, verdicts: Sequence[bool | None]) -> Tensor:
    values = [UNUSABLE if verdict is None else int(verdict) for verdict in verdicts]
    labels[index] = torch.tensor(values, dtype=torch.int8)
    return labels


def undecided(small: Tensor, large: Tensor, target: Tensor) -> Tensor:
    """[M] int64 rows where both models' choices differ from the text, so that CITER rolls out. Inputs [T] int64."""
    return ((small != target) & (large != target)).nonzero()[:, 0]


def sufficient(small: Tensor, target: Tensor, index: Tensor, verdicts: Sequence[bool | None]) -> Tensor:
    """CITER, first round: 1 where the small model writes the text's token, else 0 where the large one does.

    Where neither does, 1 iff the small model alone comes to the right answer from there.

    Args:
        small: [T] int64, the small model's argmax.
        target: [T] int64, the text's token.
        index: [M] rows of `undecided`.
        verdicts: M times: whether the roll-out's answer is right; None = cannot tell.

    Returns:
        [T] int8 with 1, 0 and `UNUSABLE`.
    """
    return _judged((small == target).to(torch.int8), index, verdicts)


def deferral(small: Tensor, large: Tensor, target: Tensor) -> Tensor:
    """[T] int8. Co-LLM, method a: 1 where the text's token is the large model's choice and not the small one's."""
    return ((large == target) & (small != target)).to(torch.int8)


def large_wins(small_right: Sequence[bool], large_right: Sequence[bool]) -> Tensor:
    """[P] int8. Query-level: 1 where only the large model is right; a tie needs no large model."""
    return torch.tensor([large and not small for small, large in zip(small_right, large_right, strict=True)]).to(
        torch.int8
    )


def sentence_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids whose text ends a sentence: a full stop, question or exclamation mark or line break, then only space."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return frozenset(i for i in ids if _SENTENCE_END.search(tokenizer.decode([i], skip_special_tokens=False)))


def until(tokens: Sequence[int], ends: Collection[int], limit: int) -> list[int]:
    """The tokens up to and with the first of `ends`, at most `limit`."""
    for place, token in enumerate(tokens[:limit]):
        if token in ends:
            return list(tokens[: place + 1])
    return list(tokens[:limit])


def same_sentence(one: str, other: str) -> bool:
    """Whether two texts agree in letters and digits; case, punctuation and space do not count.

    The heuristic where neither a judge nor an answer is at hand. It calls every rewording divergent, so it errs on the
    side of the large model.
    """
    return _INSIGNIFICANT.sub("", one).casefold() == _INSIGNIFICANT.sub("", other).casefold()
