"""Fills in what a deployment's YAML file leaves out: engine arguments, thresholds, KV budget, order of loads."""

from __future__ import annotations

from msgspec.structs import replace

from tools.build_repository.arguments import with_arguments
from tools.build_repository.kv_budget import deployment_budget
from tools.build_repository.spec import DeploymentSpec
from tools.build_repository.thresholds import tuned


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
