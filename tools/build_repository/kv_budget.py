"""KV budget of models that share GPUs; `python -m tools.kv_budget` prints it, the repository builder writes it.

Every request in flight holds about the same number of tokens in every model, so models that share a GPU get the
largest *common* number of KV tokens (the joint allocation of arXiv 2610.12242). On each GPU g:

    tokens(g) = (memory * share - sum(weights + reserve)) / sum(KV bytes per token)      over the models on g

with weights and KV heads divided by the tensor parallel size. Models connected by shared GPUs get the smallest
tokens(g) of their GPUs, rounded down to whole blocks. A model whose `max_tokens` is set by hand counts with that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenrouter.channel.address import Address
from tokenrouter.config.model_yaml import TOKENS_PER_BLOCK
from tokenrouter.engines.tensorrt_llm.config import DEFAULTS
from tokenrouter.errors import ConfigError
from tools.build_repository.replicas import expanded
from tools.build_repository.shapes import read_shape
from tools.build_repository.spec import GIB, DeploymentSpec, KvBudgetSpec, ModelSpec


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
    tokens_per_block: int
    fixed_tokens: int | None = None


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
    memory: KvBudgetSpec
    tokens: Mapping[str, int]
    load_after: Mapping[str, tuple[str, ...]]


def deployment_budget(spec: DeploymentSpec) -> Budget | None:
    """The KV budget of the models that name their GPUs; None if none does.

    Args:
        spec: with all engine arguments (`arguments.with_arguments`).

    Raises:
        ConfigError: a checkpoint is missing, or see `compute`.
    """
    budgets = host_budgets(spec)
    if not budgets:
        return None
    return Budget(
        tuple(model for budget in budgets for model in budget.models),
        spec.kv_budget,
        {name: tokens for budget in budgets for name, tokens in budget.tokens.items()},
        {name: order for budget in budgets for name, order in budget.load_after.items()},
    )


def host_budgets(spec: DeploymentSpec) -> list[Budget]:
    """The budget of every host that has GPUs: what lies on one takes nothing from another.

    Raises:
        ConfigError: as `deployment_budget`.
    """
    hosts: dict[str, list[BudgetModel]] = {}
    for name, model in expanded(spec.models).items():
        if model.gpus:
            host = Address.parse(str(model.host)).host if model.host else ""
            hosts.setdefault(host, []).append(_budget_model(name, model))
    return [compute(models, spec.kv_budget) for models in hosts.values()]


def _budget_model(name: str, model: ModelSpec) -> BudgetModel:
    shape = read_shape(Path(model.checkpoint))
    kv: dict[str, Any] = model.options.get("kv_cache_config") or {}
    dtype = str(model.options.get("dtype", "auto"))
    kv_dtype = str(kv.get("dtype", "auto"))
    block = DEFAULTS["kv_cache_config"]["tokens_per_block"] if model.engine == "tensorrt_llm" else TOKENS_PER_BLOCK
    parallel = int(model.options.get("tensor_parallel_size", 1))
    return BudgetModel(
        name=name,
        gpus=model.gpus,
        weight_bytes=-(-shape.weight_bytes(dtype=dtype) // parallel),
        kv_bytes_per_token=shape.kv_bytes_per_token(
            tensor_parallel_size=parallel, dtype=dtype if kv_dtype == "auto" else kv_dtype
        ),
        tokens_per_block=int(kv.get("tokens_per_block", block)),
        fixed_tokens=kv.get("max_tokens"),
    )


def compute(models: Sequence[BudgetModel], memory: KvBudgetSpec) -> Budget:
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


def _limit(gpu: int, group: Sequence[BudgetModel], memory: KvBudgetSpec) -> int | None:
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


def _fixed(model: BudgetModel, memory: KvBudgetSpec) -> int:
    """Bytes on each of its GPUs that do not depend on the common number."""
    return model.weight_bytes + memory.reserve + (model.fixed_tokens or 0) * model.kv_bytes_per_token


def _no_room(models: Sequence[BudgetModel], memory: KvBudgetSpec, gpu: int | None = None) -> str:
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
    """What the commands print: one row per model, then one per GPU."""
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
