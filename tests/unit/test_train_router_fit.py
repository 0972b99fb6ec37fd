"""The trainers on data that can be separated: they learn it, and their files route as the trained network says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.policy_harness import decide, make
from tokenrouter.policies.checkpoints import load_router, save_router
from tokenrouter.policies.checkpoints.win_rate import Classifier
from tools.train_router import trainers
from tools.train_router.corpus import Corpus, Facts
from tools.train_router.fit import Schedule, fit
from tools.train_router.problems import Example
from tools.train_router.trainers import Trained

ROWS, HIDDEN, TOP, VOCAB = 1500, 8, 5, 12
FAST = Schedule(rate=1e-2, weight_decay=0.0, batch=64, epochs=25, patience=25, seed=1)


def corpus() -> Corpus:
    """The small model is wrong exactly where its first hidden unit is positive; that is visible in hidden only."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    wrong = hidden[:, 0] > 0
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    examples = [Example(f"{'hard' if i % 3 == 0 else 'easy'} question {i}", "1") for i in range(300)]
    return Corpus(
        facts=Facts(
            ("s", "l"), ("", ""), "large", examples, [i % 3 != 0 for i in range(300)], [True for _ in range(300)]
        ),
        hidden=hidden,
        top_logits=torch.randn(ROWS, TOP, generator=generator).sort(-1, descending=True).values,
        small_token=torch.where(wrong, (target + 1) % VOCAB, target),
        large_token=target,
        target=target,
        example=torch.arange(ROWS) % 300,
        divergent=wrong.to(torch.int8),
        sufficient=(~wrong).to(torch.int8),
    )


EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


def train(kind: str) -> Trained:
    if kind == "r2r":
        return trainers.train_r2r(corpus(), EMBEDDING, FAST, sizes=(16, 8))
    if kind == "citer":
        return trainers.train_citer(corpus(), FAST)
    return trainers.train_collm(corpus(), torch.zeros(VOCAB, HIDDEN), replace(FAST, rate=0.1))


def route(kind: str, path: Path, data: Corpus, rows: Tensor) -> Tensor:
    """[R] bool: which rows the policy in the server sends to the large model, with the file's own threshold."""
    width = {"r2r": TOP, "citer": VOCAB, "collm": VOCAB}[kind]
    logits = data.top_logits[rows] if width == TOP else torch.zeros(len(rows), width)
    policy = make(
        kind, {"checkpoint": path.name}, directory=path.parent, input_embedding=lambda name: EMBEDDING, device="cpu"
    )
    names = decide(policy, logits, hidden=data.hidden[rows], tokens=data.small_token[rows].tolist())
    return torch.tensor([name == "large" for name in names])


@pytest.mark.parametrize("kind", ["r2r", "citer", "collm"])
def test_a_router_learns_what_can_be_learnt_and_its_file_routes_so(kind: str, tmp_path: Path) -> None:
    trained, data = train(kind), corpus()
    assert trained.quality.auc > 0.98
    assert trained.recall >= 0.95
    path = tmp_path / "router.safetensors"
    save_router(trained.router, path)
    valid = data.validation(trainers.VALIDATION_SHARE, FAST.seed).nonzero()[:, 0]
    chosen, needed = route(kind, path, data, valid), data.divergent[valid] == 1
    assert float((chosen & needed).sum() / needed.sum()) == pytest.approx(trained.recall)
    assert float(chosen.float().mean()) == pytest.approx(trained.positives)
    assert trained.positives < 0.7


@pytest.mark.parametrize("kind", ["r2r", "citer", "collm"])
def test_equal_seeds_give_equal_routers(kind: str) -> None:
    one, other = train(kind).router, train(kind).router
    assert one.threshold == other.threshold
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_the_query_classifier_learns_words_and_its_file_gives_the_same_rates(tmp_path: Path) -> None:
    trained = trainers.train_query(corpus(), share=1 / 3, schedule=FAST)
    assert trained.quality.auc > 0.98
    path = tmp_path / "query.safetensors"
    save_router(trained.router, path)
    classifier = Classifier(path)
    assert classifier.threshold == trained.router.threshold
    assert classifier("hard question 7") > classifier.threshold > classifier("easy question 7")
    policy = make("query_level", {"router": "classifier", "checkpoint": "query.safetensors"}, directory=tmp_path)
    from tokenrouter.policies.base import EntryRequest

    assert policy.entry(EntryRequest("hard question 7", [1], 0)) == "large"
    assert policy.entry(EntryRequest("easy question 7", [1], 0)) == "small"


def test_unusable_rows_do_not_count() -> None:
    data = corpus()
    spoilt = replace(data, divergent=torch.where(data.hidden[:, 1] > 0, torch.tensor(-1, dtype=torch.int8), 0))
    with pytest.raises(ValueError, match="0 of them positive"):
        trainers.train_r2r(spoilt, EMBEDDING, FAST)


def test_the_best_epoch_is_kept_and_patience_ends_the_training() -> None:
    data = corpus()
    labels = torch.randint(2, (ROWS,), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    schedule = replace(FAST, epochs=200, patience=3)
    _, quality = fit(
        lambda: torch.nn.Sequential(torch.nn.Linear(HIDDEN, 1), torch.nn.Flatten(0)),
        lambda rows: (data.hidden[rows],),
        labels,
        data.validation(0.2, 0),
        schedule,
        positive_weight=1.0,
    )
    assert quality.epochs < 200
    assert quality.loss == pytest.approx(0.693, abs=0.03)


def test_a_corpus_comes_back_from_its_folder(tmp_path: Path) -> None:
    data = corpus()
    data.save(tmp_path / "corpus")
    again = Corpus.load(tmp_path / "corpus")
    assert again.facts == data.facts
    for name in ("hidden", "top_logits", "small_token", "target", "example", "divergent", "sufficient"):
        assert torch.equal(getattr(again, name), getattr(data, name))


def test_the_default_threshold_of_the_file_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "router.safetensors"
    save_router(train("collm").router, path)
    save_router(replace(load_router(path, "collm"), threshold=0.125), path)
    assert load_router(path, "collm").threshold == 0.125
