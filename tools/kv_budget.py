"""KV budget of models that share GPUs: `python -m tools.kv_budget --config FILE`; the repository builder writes it.

Every request in flight holds about the same number of tokens in every model, so models that share a GPU get the
largest *common* number of KV tokens (the joint allocation of arXiv 2610.12242). On each GPU g:

    tokens(g) = (memory * share - sum(weights + reserve)) / sum(KV bytes per token)      over the models on g

with weights and KV heads divided by the tensor parallel size. Models connected by shared GPUs get the smallest
tokens(g) of their GPUs, rounded down to whole blocks. A model whose `max_tokens` is set by hand counts with that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tokenrouter.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class BudgetModel:
    """One model as the budget sees it; bytes are those on one of its GPUs.

    Attributes:
        gpus: the GPUs it is split over.
        weight_bytes: of weights.
        kv_bytes_per_token: of keys and values of one token.
        tokens_per_block: tokens of one KV block.
        fixed_tokens: `max_tokens` set by hand, or None.
    """

    name: str
    gpus: tuple[int, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    tokens_per_block: int = 32
    fixed_tokens: int | None = None


@dataclass(frozen=True)
class Memory:
    """What the models may take.

    Attributes:
        gpu_gib: memory of every GPU, or by GPU, in GiB.
        share: of it, in (0, 1].
        reserve_gib: per model and GPU, for activations, CUDA context and graphs.
    """

    gpu_gib: float | Mapping[int, float] = 80.0
    share: float = 0.9
    reserve_gib: float = 4.0

    def budget(self, gpu: int) -> int:
        """Bytes that the models may take on this GPU.

        Raises:
            ConfigError: the GPU's memory is not given.
        """
        memory = self.gpu_gib.get(gpu) if isinstance(self.gpu_gib, Mapping) else self.gpu_gib
        if memory is None:
            raise ConfigError(
                f"kv_budget.gpu_memory_gib has no entry for GPU {gpu}; add it, or give one number for all"
            )
        return int(memory * self.share * GIB)

    @property
    def reserve(self) -> int:
        """Bytes."""
        return int(self.reserve_gib * GIB)


@dataclass(frozen=True)
class Budget:
    """The result.

    Attributes:
        models: what it was computed for.
        memory: likewise.
        tokens: KV tokens by model.
        load_after: for each model those that load before it, since they share a GPU and have more weights there.
    """

    models: tuple[BudgetModel, ...]
    memory: Memory
    tokens: Mapping[str, int]
    load_after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def compute(models: Sequence[BudgetModel], memory: Memory) -> Budget:
    """The budget of a deployment; models that share no GPU with others are computed alone.

    Raises:
        ConfigError: a GPU cannot hold the weights with one block of KV for each model; names it and the remedy.
    """
    tokens: dict[str, int] = {}
    for group in _groups(models):
        open_models = [model for model in group if model.fixed_tokens is None]
        tokens.update({model.name: model.fixed_tokens for model in group if model.fixed_tokens is not None})
        block = math.lcm(*(model.tokens_per_block for model in open_models))
        limits = [_limit(gpu, group, memory) for gpu in sorted({gpu for model in group for gpu in model.gpus})]
        common = min((limit for limit in limits if limit is not None), default=0) // block * block
        if open_models and common < block:
            raise ConfigError(_no_room(group, memory))
        tokens.update({model.name: common for model in open_models})
    return Budget(tuple(models), memory, {model.name: tokens[model.name] for model in models}, _load_after(models))


def _groups(models: Sequence[BudgetModel]) -> list[list[BudgetModel]]:
    """Models connected by shared GPUs."""
    groups: list[list[BudgetModel]] = []
    for model in models:
        touching = [group for group in groups if any(set(model.gpus) & set(other.gpus) for other in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([*(other for group in touching for other in group), model])
    return groups


def _limit(gpu: int, group: Sequence[BudgetModel], memory: Memory) -> int | None:
    """Tokens that every open model can have on this GPU; None if none of them is there.

    Raises:
        ConfigError: weights, reserve and fixed KV alone exceed the budget.
    """
    here = [model for model in group if gpu in model.gpus]
    free = memory.budget(gpu) - sum(_fixed(model, memory) for model in here)
    if free < 0:
        raise ConfigError(_no_room(here, memory, gpu))
    per_token = sum(model.kv_bytes_per_token for model in here if model.fixed_tokens is None)
    return free // per_token if per_token else None


def _fixed(model: BudgetModel, memory: Memory) -> int:
    """Bytes on each of its GPUs that do not depend on the common number."""
    return model.weight_bytes + memory.reserve + (model.fixed_tokens or 0) * model.kv_bytes_per_token


def _no_room(models: Sequence[BudgetModel], memory: Memory, gpu: int | None = None) -> str:
    gpus = sorted({g for model in models for g in model.gpus})
    gpu = min(gpus, key=memory.budget) if gpu is None else gpu
    needs = ", ".join(f"{model.name} {_fixed(model, memory) / GIB:.1f}" for model in models)
    return (
        f"GPU {gpu}: its models do not fit into {memory.budget(gpu) / GIB:.1f} GiB (kv_budget.gpu_memory_gib * share): "
        f"before any KV cache they need, in GiB, {needs}. Give a model other or more GPUs, raise kv_budget.share, or "
        "lower kv_budget.reserve_gib"
    )


def _load_after(models: Sequence[BudgetModel]) -> dict[str, tuple[str, ...]]:
    """Largest first: the one with most weights finds the memory empty."""
    order = sorted(models, key=lambda model: (-model.weight_bytes, model.name))
    return {
        model.name: tuple(other.name for other in order[: order.index(model)] if set(other.gpus) & set(model.gpus))
        for model in models
    }


def tables(budget: Budget) -> list[Table]:
    """What `--config` prints: one row per model, then one per GPU."""
    memory = budget.memory
    by_model = Table("model", "GPUs", "weights (GiB)", "reserve (GiB)", "KV (bytes/token)", "max_tokens", "KV (GiB)")
    for model in budget.models:
        kv = budget.tokens[model.name] * model.kv_bytes_per_token
        by_model.add_row(
            model.name,
            ",".join(map(str, model.gpus)),
            f"{model.weight_bytes / GIB:.2f}",
            f"{memory.reserve / GIB:.2f}",
            str(model.kv_bytes_per_token),
            str(budget.tokens[model.name]) + ("" if model.fixed_tokens is None else " (set)"),
            f"{kv / GIB:.2f}",
        )
    by_gpu = Table("GPU", "used (GiB)", "of (GiB)", "models")
    for gpu in sorted({gpu for model in budget.models for gpu in model.gpus}):
        here = [model for model in budget.models if gpu in model.gpus]
        open_kv = sum(budget.tokens[m.name] * m.kv_bytes_per_token for m in here if m.fixed_tokens is None)
        used = open_kv + sum(_fixed(model, memory) for model in here)
        names = ", ".join(model.name for model in here)
        by_gpu.add_row(str(gpu), f"{used / GIB:.2f}", f"{memory.budget(gpu) / GIB:.2f}", names)
    return [by_model, by_gpu]


def main(
    config: Annotated[Path, typer.Option(help="The deployment's YAML file.")],
    checkpoints: Annotated[Path | None, typer.Option(help="Folder of the checkpoints.")] = None,
) -> None:
    """Prints the KV budget of a deployment; all sizes are per GPU."""
    from tools.build_repository.complete import deployment_budget
    from tools.build_repository.spec import load_spec

    console = Console()
    try:
        budget = deployment_budget(load_spec(config, checkpoints))
    except ConfigError as exc:
        Console(stderr=True).print(f"error: {exc}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from exc
    if budget is None:
        console.print("no model names its GPUs, so there is nothing to share")
        return
    for table in tables(budget):
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
