"""From a corpus to a router's file. Every rule names its source; sizes and rates suit small models by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tokenrouter.policies.checkpoints import RouterFile
from tokenrouter.policies.checkpoints.win_rate import word_buckets
from tokenrouter.policies.query_level import threshold_for_share
from tools.train_router import labels, thresholds
from tools.train_router.corpus import Corpus, held_back
from tools.train_router.features import embed
from tools.train_router.fit import Quality, Schedule, fit
from tools.train_router.networks import R2R_CLASS, R2RClassifier, WinRateClassifier, citer_classifier, deferral_row

VALIDATION_SHARE = 0.2
RECALL = 0.95
# R2R trains with rate 5e-5 and batch 1024 for up to 50 epochs, patience 10: a network of 56 million parameters. A
# network of this size needs a higher rate.
R2R_SCHEDULE = Schedule(rate=1e-3, weight_decay=5e-4, batch=1024, epochs=50, patience=10)
# CITER's default rate of 1e-7 hardly moves the weights; batch 80, patience 5 and the split 80/20 are its own.
CITER_SCHEDULE = Schedule(rate=1e-3, weight_decay=0.0, batch=80, epochs=60, patience=5)
# Co-LLM: rate 2e-5 and batch 8, one pass; here a few passes at a higher rate.
COLLM_SCHEDULE = Schedule(rate=3e-3, weight_decay=0.0, batch=256, epochs=60, patience=5)
COLLM_POSITIVE_WEIGHT = 8.0
QUERY_SCHEDULE = Schedule(rate=1e-2, weight_decay=1e-3, batch=64, epochs=60, patience=6)


@dataclass(frozen=True)
class Trained:
    """A router and what is known of it.

    Attributes:
        router: ready for `save_router`; its threshold is the one by recall (R2R's rule), or by share (query-level).
        recall, positives: of the threshold, on the same rows.
    """

    router: RouterFile
    quality: Quality
    recall: float
    positives: float


def train_r2r(
    corpus: Corpus,
    embedding: Tensor,
    schedule: Schedule = R2R_SCHEDULE,
    recall: float = RECALL,
    sizes: Sequence[int] = (64, 64),
) -> Trained:
    """R2R's network on `divergent`: weighted binary cross-entropy, positive weight zeros / ones.

    Args:
        corpus: over the large model's own answers.
        embedding: [V, E] input embedding of the small model; frozen, and not stored.
        recall: what the stored threshold has at least.
    """
    hidden, logits, tokens = corpus.hidden.float(), corpus.top_logits, embed(embedding, corpus.small_token)
    network, quality = fit(
        lambda: R2RClassifier(hidden.shape[1], tokens.shape[1], logits.shape[1], sizes, expansion=2, dropout=0.1),
        lambda rows: (hidden[rows], tokens[rows], logits[rows]),
        corpus.divergent,
        corpus.validation(VALIDATION_SHARE, schedule.seed),
        schedule,
        title="R2R",
    )
    router = _file("r2r", network.state_dict(), corpus, model_type=R2R_CLASS, normalize_input=False)
    return _by_recall(router, quality, recall)


def train_citer(corpus: Corpus, schedule: Schedule = CITER_SCHEDULE, recall: float = RECALL) -> Trained:
    """CITER's network on `sufficient`, its first round: plain binary cross-entropy."""
    hidden = corpus.hidden.float()
    network, quality = fit(
        lambda: citer_classifier(hidden.shape[1]),
        lambda rows: (hidden[rows],),
        corpus.sufficient,
        corpus.validation(VALIDATION_SHARE, schedule.seed),
        schedule,
        positive_weight=1.0,
        title="CITER",
    )
    return _by_recall(_file("citer", network.state_dict(), corpus), quality, recall, of_small=True)


def train_collm(corpus: Corpus, head: Tensor, schedule: Schedule = COLLM_SCHEDULE, recall: float = RECALL) -> Trained:
    """Co-LLM's row g alone, on `labels.deferral` (method a), positives weighted 8; the small model stays as it is.

    Args:
        corpus: over reference texts, or the large model's answers where there are none.
        head: [V, H] output embedding of the small model; g starts at its mean.
        recall: what the stored threshold has at least.
    """
    hidden = corpus.hidden.float()
    network, quality = fit(
        lambda: deferral_row(head.float().mean(0)),
        lambda rows: (hidden[rows],),
        labels.deferral(corpus.small_token, corpus.large_token, corpus.target),
        corpus.validation(VALIDATION_SHARE, schedule.seed),
        schedule,
        positive_weight=COLLM_POSITIVE_WEIGHT,
        title="Co-LLM",
    )
    row = {"deferral.weight": network.state_dict()["deferral.weight"][0]}
    return _by_recall(_file("collm", row, corpus), quality, recall)


def train_query(
    corpus: Corpus, share: float = 0.3, schedule: Schedule = QUERY_SCHEDULE, buckets: int = 512, width: int = 8
) -> Trained:
    """Our query classifier on "only the large model is right"; ties are the small model's (lm-sys/RouteLLM).

    Args:
        corpus: answers of both models, judged.
        share: of validation prompts that the threshold sends to the large model.
        buckets: rows of the table of hashed words.
        width: of its rows.

    Raises:
        ValueError: no answer was judged.
    """
    facts = corpus.facts
    judged = [i for i, pair in enumerate(zip(facts.small_right, facts.large_right, strict=True)) if None not in pair]
    if not judged:
        raise ValueError("nobody judged the answers; collect with a checker, from problems with answers")
    wins = labels.large_wins([bool(facts.small_right[i]) for i in judged], [bool(facts.large_right[i]) for i in judged])
    words = [word_buckets(facts.examples[i].prompt, buckets) for i in judged]
    network, quality = fit(
        lambda: WinRateClassifier(buckets, width),
        lambda rows: _bags([words[row] for row in rows.tolist()]),
        wins,
        held_back(len(judged), VALIDATION_SHARE, schedule.seed),
        schedule,
        positive_weight=1.0,
        title="query-level",
    )
    rates = quality.scores.double().sigmoid()
    threshold = threshold_for_share(rates.tolist(), share)
    chosen = rates >= threshold
    recall = float((chosen & (quality.labels == 1)).sum() / (quality.labels == 1).sum().clamp(min=1))
    router = replace(_file("query_level", network.state_dict(), corpus), threshold=threshold)
    return Trained(router, quality, recall, float(chosen.float().mean()))


def _bags(words: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """All bucket ids, and where each text begins."""
    starts = list(accumulate((len(text) for text in words), initial=0))[:-1]
    return torch.tensor([word for text in words for word in text]), torch.tensor(starts)


def _file(kind: str, tensors: Mapping[str, Tensor], corpus: Corpus, **args: object) -> RouterFile:
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return RouterFile(kind, kept, models=corpus.facts.models, args=args)


def _by_recall(router: RouterFile, quality: Quality, recall: float, *, of_small: bool = False) -> Trained:
    """With R2R's threshold; `of_small`: the score says that the small model suffices, not that the large is needed."""
    needed, found = quality.scores.sigmoid(), quality.labels
    if of_small:
        needed, found = 1.0 - needed, 1.0 - found
    threshold, reached, positives = thresholds.by_recall(needed, found, recall)
    return Trained(replace(router, threshold=1.0 - threshold if of_small else threshold), quality, reached, positives)
