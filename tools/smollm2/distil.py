"""Distils a shallow model from the large one: on the large one's answers, towards its probabilities."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from tools.progress import LateProgress
from tools.smollm2.answers import Answer
from tools.smollm2.checkpoints import Checkpoint
from tools.smollm2.layers import EMBEDDING, shallow
from tools.smollm2.texts import hidden_of, pack

# Batches drawn together and sorted by length.
_BATCHES_PER_POOL = 16


@dataclass(frozen=True)
class Recipe:
    """What determines a small model, apart from the answers and the number of threads.

    Attributes:
        layers: of the large model, which the small one starts from.
        rate: peak learning rate (AdamW); the last `decay` of the steps lead it linearly to zero.
        sampled: tokens that stand for all that are no candidate in a batch; see `loss_of`.
        seed: of the order of answers and of these tokens.
    """

    steps: int
    layers: tuple[int, ...] = (0, 1, 8, 15, 22, 29)
    batch_size: int = 16
    rate: float = 1e-3
    warmup_steps: int = 20
    decay: float = 0.5
    sampled: int = 2048
    seed: int = 1


def loss_of(
    hidden: Tensor, answers: Sequence[Answer], embedding: Tensor, sampled: int, generator: torch.Generator
) -> Tensor:
    """Kullback-Leibler divergence from the large model's probabilities, over its candidates; a scalar, in nats.

    The LM head is the largest part of a model this small, so only a part of the vocabulary is computed: all candidates
    of the batch, and a sample of the others that stands for them in the normalisation.

    Args:
        hidden: [n, H], as `hidden_of` has them, of the answers' n tokens.
        embedding: [V, H].
        sampled: how many of the other tokens are computed.
    """
    candidates = torch.cat([answer.candidates for answer in answers]).long()
    known, places = torch.unique(candidates, return_inverse=True)
    others = torch.ones(len(embedding), dtype=torch.bool)
    others[known] = False
    rest = others.nonzero()[:, 0]
    picked = rest[torch.randperm(len(rest), generator=generator)[:sampled]]
    logits = (hidden.to(embedding.dtype) @ embedding[torch.cat([known, picked])].T).float()
    weight = torch.zeros(logits.shape[1])
    weight[len(known) :] = math.log(max(1, len(rest)) / max(1, len(picked)))
    mine = logits.gather(1, places) - (logits + weight).logsumexp(1, keepdim=True)
    theirs = torch.cat([answer.log_probs for answer in answers]).float().log_softmax(1)
    return (theirs.exp() * (theirs - mine)).sum(1).mean()


def batches(answers: Sequence[Answer], size: int, seed: int) -> Iterator[list[Answer]]:
    """Yields batches of near-equal length without end; every answer occurs once in a round."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(answers, len(answers))
        parts = []
        for start in range(0, len(order), size * _BATCHES_PER_POOL):
            pool = sorted(order[start : start + size * _BATCHES_PER_POOL], key=_length)
            parts += [pool[i : i + size] for i in range(0, len(pool), size)]
        rng.shuffle(parts)
        yield from parts


def _length(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.tokens)


def rate_factor(recipe: Recipe, step: int) -> float:
    """Share of the peak learning rate at a step (from 0): linear warm-up, constant, linear decay to zero."""
    left = (recipe.steps - step) / (recipe.decay * recipe.steps)
    return min((step + 1) / min(recipe.warmup_steps, recipe.steps), 1.0, left)


class Distillation:
    """One training; it can stop after any step, and go on from what `save` wrote."""

    def __init__(self, large: Checkpoint, answers: Sequence[Answer], recipe: Recipe) -> None:
        self._answers, self._recipe = answers, recipe
        start = shallow(large, recipe.layers)
        self._names = set(start.tensors) - {EMBEDDING}
        self.model = start.model()
        embedding: Tensor = self.model.get_input_embeddings().weight.requires_grad_(False)
        # Rounded as autocast rounds the layers.
        self._embedding = embedding.bfloat16()
        self._own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._own, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(recipe.seed)
        self.step = 0

    def run(self, report: LateProgress, draft: Path, every: int) -> None:
        """Trains to the end; saves into `draft` every so many steps."""
        if draft.exists():
            self._resume(draft)
        total = self._recipe.steps
        loss = 0.0
        parts = batches(self._answers, self._recipe.batch_size, self._recipe.seed)
        for part in islice(parts, self.step, total):
            now = self._update(part)
            loss = now if self.step == 0 else 0.95 * loss + 0.05 * now
            self.step += 1
            report(f"step {self.step} of {total}, loss {loss:.3f}", self.step / total)
            if self.step % every == 0 or self.step == total:
                self._save(draft)
                report.note(f"step {self.step}: loss {loss:.3f}")

    def own(self) -> dict[str, Tensor]:
        """The tensors that are the small model's own."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items() if name in self._names}

    def _update(self, answers: Sequence[Answer]) -> float:
        factor = rate_factor(self._recipe, self.step)
        # bfloat16 products are twice as fast where the CPU has them, and rounding does not show in a loss this size.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = hidden_of(self.model, pack([(answer.prompt, answer.tokens) for answer in answers]))
        loss = loss_of(hidden, answers, self._embedding, self._recipe.sampled, self._generator)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._own, 1.0)
        self._optimizer.param_groups[0]["lr"] = self._recipe.rate * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _save(self, draft: Path) -> None:
        state = {"step": self.step, "model": self.own(), "optimizer": self._optimizer.state_dict()}
        torch.save({**state, "generator": self._generator.get_state()}, draft.with_suffix(".part"))
        draft.with_suffix(".part").replace(draft)

    def _resume(self, draft: Path) -> None:
        state = torch.load(draft, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
