"""One training loop for all routers, and measures of what came out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.progress import counted


@dataclass(frozen=True)
class Schedule:
    """How a network is trained.

    Attributes:
        rate, weight_decay: of AdamW.
        patience: stop after so many epochs without a better validation loss.
        seed: of weights, order and dropout.
    """

    rate: float
    weight_decay: float
    batch: int
    epochs: int
    patience: int
    seed: int = 0


@dataclass(frozen=True)
class Quality:
    """What came out, on validation rows.

    Attributes:
        loss: binary cross-entropy, weighted as in training.
        auc: area under the ROC curve; 0.5 if only one class occurs.
        scores: [V] float32, the network's logits.
        labels: [V] float32.
        epochs: trained until the patience ended.
    """

    loss: float
    auc: float
    scores: Tensor
    labels: Tensor
    epochs: int


# Rows of a split: an index tensor -> the network's inputs for these rows.
Inputs = Callable[[Tensor], tuple[Tensor, ...]]


def fit(
    make: Callable[[], nn.Module],
    inputs: Inputs,
    labels: Tensor,
    validation: Tensor,
    schedule: Schedule,
    *,
    positive_weight: float | None = None,
    title: str = "training",
) -> tuple[nn.Module, Quality]:
    """Trains on binary cross-entropy with logits and keeps the weights of the best validation loss.

    Args:
        make: builds the network; called after seeding.
        labels: [T], 1, 0, or negative for rows that do not count.
        validation: [T] bool, rows that are not trained on.
        positive_weight: of label 1; by default zeros / ones among the training rows (R2R).

    Raises:
        ValueError: a split has no rows, or the training rows are all of one class.
    """
    torch.manual_seed(schedule.seed)
    train_rows, valid_rows = _split(labels, validation)
    ones = int((labels[train_rows] == 1).sum())
    weight = torch.tensor((len(train_rows) - ones) / ones if positive_weight is None else positive_weight)
    target = labels.float()
    network = make()
    optimizer = torch.optim.AdamW(network.parameters(), lr=schedule.rate, weight_decay=schedule.weight_decay)
    best, best_loss, waited, epochs = copy.deepcopy(network.state_dict()), float("inf"), 0, 0
    with counted(title, schedule.epochs) as advance:
        while epochs < schedule.epochs and waited < schedule.patience:
            _epoch(network, optimizer, inputs, target, train_rows, schedule.batch, weight)
            current = float(_loss(scores(network, inputs, valid_rows), target[valid_rows], weight))
            waited = 0 if current < best_loss else waited + 1
            if waited == 0:
                best, best_loss = copy.deepcopy(network.state_dict()), current
            epochs += 1
            advance(1)
    network.load_state_dict(best)
    found = scores(network, inputs, valid_rows)
    return network.eval(), Quality(best_loss, auc(found, target[valid_rows]), found, target[valid_rows], epochs)


def _split(labels: Tensor, validation: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of rows to train on and to validate on."""
    train, valid = (((labels >= 0) & side).nonzero()[:, 0] for side in (~validation, validation))
    ones = int((labels[train] == 1).sum())
    if not len(valid) or not 0 < ones < len(train):
        raise ValueError(
            f"{len(train)} training rows, {ones} of them positive, and {len(valid)} validation rows: too few, or all "
            "alike; collect more problems"
        )
    return train, valid


def _epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Inputs,
    target: Tensor,
    rows: Tensor,
    batch: int,
    weight: Tensor,
) -> None:
    """One pass in random order; a last batch of a single row is left out, batch norm cannot take it."""
    network.train()
    for part in torch.split(rows[torch.randperm(len(rows))], batch):
        if len(part) == 1:
            continue
        loss = _loss(network(*inputs(part)), target[part], weight)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


@torch.no_grad()
def scores(network: nn.Module, inputs: Inputs, rows: Tensor, batch: int = 8192) -> Tensor:
    """[R] float32 logits of rows, in evaluation mode."""
    network.eval()
    return torch.cat([network(*inputs(part)) for part in torch.split(rows, batch)])


def _loss(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, target, pos_weight=weight)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Probability that a random positive scores above a random negative; ties count half.

    Args:
        scores: [V].
        labels: [V], 1 or 0.
    """
    positives = int((labels == 1).sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return 0.5
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    # Mean rank of each group of equal scores, from 1.
    ranks = (last - (counts.double() - 1) / 2)[inverse]
    total = float(ranks[labels == 1].sum())
    return (total - positives * (positives + 1) / 2) / (positives * negatives)
