"""Fills in what a deployment's YAML file leaves out: engine arguments, thresholds, KV budget, order of loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tools.build_repository import tensorrt_llm
from tools.build_repository.shapes import read_shape
from tools.build_repository.spec import DeploymentSpec, ModelSpec
from tools.build_repository.thresholds import tuned
from tools.kv_budget import Budget, BudgetModel, Memory, compute

_TOKENS_PER_BLOCK = {"torch": 16, "tensorrt_llm": 32}


def with_arguments(spec: DeploymentSpec) -> DeploymentSpec:
    """The deployment with all engine arguments that depend on a model's own entry only."""
    return replace(spec, models={name: _with_arguments(model) for name, model in spec.models.items()})


def _with_arguments(model: ModelSpec) -> ModelSpec:
    if model.engine == "tensorrt_llm":
        options = tensorrt_llm.complete(model.options, gpus=len(model.gpus), extend_tokens=model.extend_tokens)
        return replace(model, options=options)
    if model.engine == "torch" and len(model.gpus) == 1:
        return replace(model, options={"device": f"cuda:{model.gpus[0]}", **model.options})
    return model


def completed(spec: DeploymentSpec) -> DeploymentSpec:
    """The deployment as it is written; checked before (`check.checked`).

    Raises:
        ConfigError: checkpoints or the profile are missing, or the models do not fit onto their GPUs.
    """
    spec = tuned(with_arguments(spec))
    budget = deployment_budget(spec)
    if budget is None:
        return spec
    models = dict(spec.models)
    for name, tokens in budget.tokens.items():
        model = models[name]
        kv = {**(model.options.get("kv_cache_config") or {}), "max_tokens": tokens}
        order = model.load_after or budget.load_after[name]
        models[name] = replace(model, options={**model.options, "kv_cache_config": kv}, load_after=order)
    return replace(spec, models=models)


def deployment_budget(spec: DeploymentSpec) -> Budget | None:
    """The KV budget of the models that name their GPUs; None if none does.

    Raises:
        ConfigError: see `completed`.
    """
    spec = with_arguments(spec)
    models = [_budget_model(name, model) for name, model in spec.models.items() if model.gpus]
    given = spec.kv_budget
    return compute(models, Memory(given.gpu_memory_gib, given.share, given.reserve_gib)) if models else None


def _budget_model(name: str, model: ModelSpec) -> BudgetModel:
    shape = read_shape(Path(model.checkpoint))
    kv: dict[str, Any] = model.options.get("kv_cache_config") or {}
    dtype = str(model.options.get("dtype", "auto"))
    kv_dtype = str(kv.get("dtype", "auto"))
    parallel = int(model.options.get("tensor_parallel_size", 1))
    return BudgetModel(
        name=name,
        gpus=model.gpus,
        weight_bytes=-(-shape.weight_bytes(dtype=dtype) // parallel),
        kv_bytes_per_token=shape.kv_bytes_per_token(
            tensor_parallel_size=parallel, dtype=dtype if kv_dtype == "auto" else kv_dtype
        ),
        tokens_per_block=int(kv.get("tokens_per_block", _TOKENS_PER_BLOCK.get(model.engine, 32))),
        fixed_tokens=kv.get("max_tokens"),
    )
