"""What routing gives on this pair: tokens by the large model, and what the large model thinks of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from tokenrouter.offline import TokenRouter
from tokenrouter.request import RequestFields
from tools.evaluate import Setting
from tools.smollm2.texts import fit_of


@dataclass(frozen=True)
class Routed:
    """One policy over all prompts, greedily.

    Attributes:
        share_large: of all tokens, those of the large model.
        agreement, perplexity: of the large model with these texts; its own have an agreement of 1.
    """

    label: str
    share_large: float
    handoffs: float
    agreement: float
    perplexity: float


def route(
    router: TokenRouter, large: Any, prompts: Sequence[Sequence[int]], setting: Setting, max_tokens: int
) -> Routed:
    """Runs all prompts under one policy, together, in this process."""
    results = router.generate(
        [
            RequestFields(
                input_ids=list(ids),
                max_tokens=max_tokens,
                temperature=0.0,
                policy=setting.policy,
                policy_params=setting.params,
                seed=seed,
            )
            for seed, ids in enumerate(prompts)
        ]
    )
    texts = [(torch.tensor(ids), torch.tensor(result.tokens)) for ids, result in zip(prompts, results, strict=True)]
    fit = fit_of(large, texts)
    total = sum(len(result.tokens) for result in results)
    by_small = sum(result.tokens_by_model.get(router.models[0], 0) for result in results)
    handoffs = sum(result.handoffs for result in results) / len(results)
    return Routed(setting.label, 1 - by_small / total, handoffs, fit.agreement, fit.perplexity)


def table(rows: Sequence[Routed]) -> Table:
    found = Table("policy", "large tokens", "hand-offs/answer", "large agrees", "perplexity under large")
    for row in rows:
        found.add_row(
            row.label,
            f"{row.share_large:.1%}",
            f"{row.handoffs:.1f}",
            f"{row.agreement:.1%}",
            f"{row.perplexity:.2f}",
        )
    return found
