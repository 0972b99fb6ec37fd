"""Fills in what a deployment leaves out, and finds what is wrong with it before anything is written.

Every problem names its field and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from tokenrouter.config.model_yaml import VERSION_FOLDER
from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
from tokenrouter.errors import ConfigError, RouterError
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import Policy, load_policy
from tokenrouter.policies.base import PolicyContext
from tokenrouter.replicas import replica_names
from tokenrouter.vocabulary import check_same_tokenizer
from tools.build_repository.arguments import with_arguments
from tools.build_repository.build import name_problems
from tools.build_repository.hosts import host_problems
from tools.build_repository.kv_budget import deployment_budget
from tools.build_repository.model_checks import caught, checkpoint_problems, model_problems
from tools.build_repository.replicas import replica_problems, replicas_of
from tools.build_repository.routers import policy_params, router_problems
from tools.build_repository.spec import DeploymentSpec, EntrySpec
from tools.build_repository.thresholds import threshold_problems, tuned


def checked(spec: DeploymentSpec, output: Path, *, weights: bool = True) -> DeploymentSpec:
    """The completed deployment.

    Args:
        spec: as loaded.
        output: folder of the repository; what lies there already (checkpoints, routers) counts.
        weights: whether checkpoints have to have theirs already.

    Raises:
        ConfigError: something is wrong; lists all problems that could be found together.
    """
    found = list(_independent_problems(spec, output, weights))
    finished = None
    if not found:
        try:
            finished = _completed(spec)
        except ConfigError as exc:
            found.append(str(exc))
    if finished is not None:
        found += [*threshold_problems(finished), *_length_problems(finished), *_engine_problems(finished, output)]
    if found or finished is None:
        raise ConfigError(found[0] if len(found) == 1 else "\n".join([f"{len(found)} problems:", *_bullets(found)]))
    return finished


def _completed(spec: DeploymentSpec) -> DeploymentSpec:
    """The deployment as it is written: engine arguments, thresholds, KV budget, order of loads.

    Raises:
        ConfigError: checkpoints or the profile are missing, or the models do not fit onto their GPUs.
    """
    spec = tuned(with_arguments(spec))
    budget = deployment_budget(spec)
    if budget is None:
        return spec
    models = dict(spec.models)
    for name, model in spec.models.items():
        # All replicas are alike: the one with the least room decides.
        replicas = [each for each in replica_names(name, model.replicas) if each in budget.tokens]
        if not replicas:
            continue
        tokens = min(budget.tokens[each] for each in replicas)
        kv = {**(model.options.get("kv_cache_config") or {}), "max_tokens": tokens}
        order = model.load_after or tuple(dict.fromkeys(o for each in replicas for o in budget.load_after[each]))
        models[name] = replace(model, options={**model.options, "kv_cache_config": kv}, load_after=order)
    return replace(spec, models=models)


def _bullets(found: list[str]) -> list[str]:
    return [f"  - {problem}" for problem in found]


def _independent_problems(spec: DeploymentSpec, output: Path, weights: bool) -> Iterator[str]:
    """Problems that can be seen without the completed deployment."""
    yield from name_problems(spec)
    if problems := list(host_problems(spec)):
        yield from problems
        return  # what follows looks at every replica by itself
    folders: dict[str, Path] = {}
    told: list[str] = []
    missing = False
    for name, model in spec.models.items():
        yield from (f"models.{name}.{problem}" for problem in replica_problems(model))
        model = replicas_of(name, model)[name]
        yield from (f"models.{name}.{problem}" for problem in model_problems(model))
        folder = output / name / "1" if model.checkpoint == VERSION_FOLDER else Path(model.checkpoint)
        if (folder / "config.json").is_file():
            folders[name] = folder
            told += (f"models.{name}.{problem}" for problem in checkpoint_problems(model, folder, weights=weights))
        elif model.checkpoint != VERSION_FOLDER:
            missing = True
            yield (
                f"models.{name}.checkpoint: {folder} has no config.json; give a folder in Hugging Face format, or say "
                "with --checkpoints where it lies"
            )
        if model.checkpoint == VERSION_FOLDER and model.gpus:
            yield f"models.{name}.checkpoint is missing; the KV budget needs a folder in Hugging Face format"
    yield from told
    if folders and not missing:
        problems = caught(lambda: _same_tokenizer(spec.entry, folders))
        yield from (problem for problem in problems if not any(problem in each for each in told))
    yield from router_problems(spec.entry)
    yield from caught(lambda: _policy(spec, output))
    yield from speculation_problems(spec, output)
    if spec.tuning is None:
        yield from threshold_problems(spec)


def _same_tokenizer(entry: EntrySpec, folders: dict[str, Path]) -> None:
    check_same_tokenizer(
        folders,
        allow_added_tokens=entry.allow_added_tokens,
        allow_special_tokens=entry.allow_special_tokens,
        compare_ends=entry.end_ids is None,
    )


def _policy(spec: DeploymentSpec, output: Path) -> Policy:
    """The policy as the orchestrator will build it; its files are not read.

    Raises:
        ConfigError: it refuses its parameters.
    """
    params = json.dumps(policy_params(spec.entry))
    context = PolicyContext(tuple(spec.models), str(output.absolute()))
    try:
        return load_policy(PolicySpec(spec.entry.policy, params), context)
    except RouterError as exc:
        raise ConfigError(f"entry.policy {spec.entry.policy!r}: {exc}") from exc


def speculation_problems(spec: DeploymentSpec, output: Path) -> Iterator[str]:
    """Going ahead needs a policy that allows it, engines that are stepped, and room for the guesses."""
    speculation = spec.entry.speculation
    if speculation is None:
        return
    try:
        policy = _policy(spec, output)
    except ConfigError:
        return  # told elsewhere
    if len(spec.models) != 2 or not policy.speculates():
        yield (
            f"entry.speculation: policy {spec.entry.policy!r} cannot go ahead, since its decisions need more than "
            "logits, hidden states and tokens of two models; leave entry.speculation out"
        )
    for name, model in spec.models.items():
        if model.engine == "tensorrt_llm":
            yield (
                f"entry.speculation: the engine of models.{name}, tensorrt_llm, owns its decoding loop and cannot "
                "check guesses; leave entry.speculation out"
            )
        length = model.options.get("max_seq_len")
        if isinstance(length, int) and speculation.depth >= length:
            yield (
                f"entry.speculation.depth is {speculation.depth}; models.{name}.options.max_seq_len is {length}: lower "
                "the depth"
            )


def _engine_problems(spec: DeploymentSpec, output: Path) -> Iterator[str]:
    """What the adapter of TensorRT-LLM will refuse at load, minutes later and on another machine."""
    policy = _policy(spec, output)
    for name, model in spec.models.items():
        if model.engine != "tensorrt_llm":
            continue
        try:
            config = TensorRtLlmConfig.from_mapping(Path(model.checkpoint), model.options)
        except ConfigError as exc:
            yield f"models.{name}.options: {exc}"
            continue
        unused = len(config.own.handoff_ids or ())
        if policy.decides(name) and unused < len(spec.models):
            yield (
                f"models.{name}.options.handoff_ids: {len(spec.models)} token ids that mean nothing are needed to end "
                f"visits with, and the checkpoint leaves {unused} unused; name some, such as reserved or padding tokens"
            )


def _length_problems(spec: DeploymentSpec) -> Iterator[str]:
    """The pool's share of routed requests has to hold at least one sequence of full length."""
    for name, model in spec.models.items():
        tokens: int | None = (model.options.get("kv_cache_config") or {}).get("max_tokens")
        length: int | None = model.options.get("max_seq_len")
        share = model.direct_kv_share + (0.0 if spec.entry.unary is None else model.unary_kv_share)
        entries = spec.entry.routed_orchestrators
        if model.gpus and length and tokens and (tokens - int(tokens * share)) // entries < length:
            shared = f", and {entries} entry models share the rest (routed_orchestrators)" if entries > 1 else ""
            yield (
                f"models.{name}.options.max_seq_len is {length}, but only {tokens} KV tokens fit onto its GPUs, and "
                f"direct_kv_share and unary_kv_share take {share:g} of them{shared}; lower one, raise kv_budget.share, "
                "or use more GPUs"
            )
