"""Trains the demo models on the CPU and writes them as Hugging Face checkpoints."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_models.evaluate import accuracy, load_tokenizer
from tools.demo_models.task import Problem, Split, WorkedProblem, generate_problems
from tools.demo_models.tokenizer import END_OF_TEXT_ID, MAX_LENGTH, PAD_ID, build_tokenizer, save_tokenizer
from tools.progress import LateProgress

# Targets with this value are left out of the loss (the default of torch's cross_entropy).
_IGNORED = -100
# Batches drawn together and sorted by length: enough to fill batches of near-equal length, few enough to stay random.
_BATCHES_PER_POOL = 32
# Away from every seed of an evaluation, though the splits are disjoint whatever the seeds.
_PROBE_SEED = 10_000
_PROBE_SIZE = 96
_PROBE_EVERY = 250


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a trained model, apart from the number of threads.

    Attributes:
        num_heads: Attention heads, of 32 channels each.
        matrix_rate: Peak learning rate of the layers' matrices (Muon).
        other_rate: Peak learning rate of the embedding and the norms (AdamW).
        warmup_steps: Steps of linear warm-up before the cosine decay to zero.
        seed: Of the weights and of the training problems.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    steps: int
    batch_size: int = 64
    matrix_rate: float = 8e-3
    other_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.02
    seed: int = 1


# The small model's training stops early on purpose: given 5,000 steps it answers two problems in three, which leaves
# little for a router to gain.
RECIPES = {
    "large": Recipe(
        hidden_size=128, intermediate_size=384, num_layers=5, num_heads=4, num_kv_heads=2, steps=2500, seed=1
    ),
    "small": Recipe(
        hidden_size=64, intermediate_size=160, num_layers=2, num_heads=2, num_kv_heads=1, steps=3000, seed=2
    ),
}


@dataclass(frozen=True)
class Batch:
    """A right-padded training batch.

    Attributes:
        input_ids: Token ids, [batch, length].
        targets: The token to predict at each position, or _IGNORED, [batch, length].
    """

    input_ids: Tensor
    targets: Tensor


def build_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """Builds a model with random weights, determined by the recipe's seed."""
    config = Qwen3Config(
        vocab_size=build_tokenizer().get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


def training_batches(recipe: Recipe) -> Iterator[Batch]:
    """Yields an endless stream of batches, drawn on the fly; each holds problems of near-equal length."""
    problems = generate_problems(Split.TRAIN, recipe.seed)
    rng = random.Random(recipe.seed)
    tokenizer = build_tokenizer()
    while True:
        pool = sorted(islice(problems, recipe.batch_size * _BATCHES_PER_POOL), key=_length)
        starts = list(range(0, len(pool), recipe.batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield _collate(tokenizer, pool[start : start + recipe.batch_size])


def rate_factor(recipe: Recipe, step: int) -> float:
    """Returns the share of the peak learning rates at a step (from 0): linear warm-up, then a cosine to zero."""
    warmup = min(recipe.warmup_steps, max(1, recipe.steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, recipe.steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Returns the mean cross entropy of the completion tokens, a scalar."""
    # No attention mask: padding is on the right, where causal attention never looks from a position that counts.
    logits: Tensor = model(input_ids=batch.input_ids, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=_IGNORED)


def train(recipe: Recipe, *, report: LateProgress | None = None, name: str = "") -> Qwen3ForCausalLM:
    """Trains one model; returns it in evaluation mode.

    Args:
        report: told every step, and every `_PROBE_EVERY` steps the held-out accuracy.
    """
    model = build_model(recipe)
    optimizers = _optimizers(model, recipe)
    probe = _probe_problems()
    for step, batch in enumerate(islice(training_batches(recipe), recipe.steps), start=1):
        loss = _update(model, optimizers, batch, rate_factor(recipe, step - 1))
        if report is None:
            continue
        report(f"{name}: step {step} of {recipe.steps}, loss {loss:.4f}", step / recipe.steps)
        if step % _PROBE_EVERY == 0:
            measured = accuracy(model, load_tokenizer(), probe)
            report.note(f"{name} step {step}: loss {loss:.4f}, held-out accuracy {measured:.1%}")
    model.train(False)
    return model


def save_checkpoint(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Writes a checkpoint folder that transformers loads: configuration, weights and tokenizer."""
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    # safetensors makes the file private to its owner; a server usually runs as somebody else.
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(folder)


def parameter_count(model: Qwen3ForCausalLM) -> int:
    """Returns the number of parameters; the tied embedding counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _collate(tokenizer: Tokenizer, problems: Sequence[WorkedProblem]) -> Batch:
    rows = [[*tokenizer.encode(p.prompt + p.completion).ids, END_OF_TEXT_ID] for p in problems]
    # Position i predicts token i + 1, hence one column less than tokens.
    width = max(map(len, rows)) - 1
    input_ids = torch.full((len(rows), width), PAD_ID)
    targets = torch.full((len(rows), width), _IGNORED)
    for index, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        ids = torch.tensor(row)
        prompt_length = len(problem.prompt)
        input_ids[index, : len(row) - 1] = ids[:-1]
        targets[index, prompt_length - 1 : len(row) - 1] = ids[prompt_length:]
    return Batch(input_ids, targets)


def _length(problem: WorkedProblem) -> int:
    """Returns the length in characters, which are tokens here: the task is ASCII and the tokenizer has no merges."""
    return len(problem.prompt) + len(problem.completion)


def _probe_problems() -> list[Problem]:
    """Returns the few held-out problems that show progress during training."""
    return [p.without_solution() for p in islice(generate_problems(Split.HELD_OUT, _PROBE_SEED), _PROBE_SIZE)]


def _optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Builds Muon for the matrices of the layers, and AdamW for the embedding and the norms."""
    # Muon learns this task in about a quarter of AdamW's steps, for a fifth more time a step. It is meant for
    # matrices between hidden spaces, which the (tied) embedding is not.
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _update(model: Qwen3ForCausalLM, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, factor: float) -> float:
    """Takes one step at ``factor`` times the peak learning rates and returns the loss before it."""
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # The peak is kept beside the rate: a float that was scaled every step would drift.
            group["lr"] = group.setdefault("peak", group["lr"]) * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()
