"""Finds what is wrong with a deployment before anything is written. Every problem names its field and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenrouter.config import ENGINES
from tokenrouter.errors import ConfigError, RouterError
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import PolicyContext
from tokenrouter.vocabulary import check_same_tokenizer
from tools.repository import tensorrt_llm
from tools.repository.complete import completed
from tools.repository.routers import policy_params, router_problems
from tools.repository.shapes import read_shape
from tools.repository.spec import VERSION_FOLDER, DeploymentSpec, ModelSpec
from tools.repository.tuning import check_profile, threshold_problems


def checked(spec: DeploymentSpec, output: Path) -> DeploymentSpec:
    """The completed deployment.

    Args:
        spec: as loaded.
        output: folder of the repository; what lies there already (checkpoints, routers) counts.

    Raises:
        ConfigError: something is wrong; lists all problems that could be found together.
    """
    found = list(_independent_problems(spec, output))
    finished = None
    if not found:
        found += _caught(lambda: check_profile(spec)) if spec.tuning else []
    if not found:
        try:
            finished = completed(spec)
        except ConfigError as exc:
            found.append(str(exc))
    if finished is not None:
        found += [*threshold_problems(finished), *_length_problems(finished)]
    if found or finished is None:
        raise ConfigError(found[0] if len(found) == 1 else "\n".join([f"{len(found)} problems:", *_bullets(found)]))
    return finished


def _bullets(found: list[str]) -> list[str]:
    return [f"  - {problem}" for problem in found]


def _caught(check: Callable[[], object]) -> list[str]:
    """The problem that a check raises, if any."""
    try:
        check()
    except (RouterError, msgspec.ValidationError) as exc:
        return [str(exc)]
    return []


def _independent_problems(spec: DeploymentSpec, output: Path) -> Iterator[str]:
    """Problems that can be seen without the completed deployment."""
    yield from name_problems(spec)
    folders: dict[str, Path] = {}
    missing = False
    for name, model in spec.models.items():
        yield from (f"models.{name}.{problem}" for problem in _model_problems(model))
        folder = output / name / "1" if model.checkpoint == VERSION_FOLDER else Path(model.checkpoint)
        if (folder / "config.json").is_file():
            folders[name] = folder
        elif model.checkpoint != VERSION_FOLDER:
            missing = True
            yield (
                f"models.{name}.checkpoint: {folder} has no config.json; give a folder in Hugging Face format, or say "
                "with --checkpoints where it lies"
            )
        elif model.gpus:
            yield f"models.{name}.checkpoint: the KV budget needs it; name a folder in Hugging Face format"
    if len(folders) > 1 and not missing:
        entry = spec.entry
        yield from _caught(
            lambda: check_same_tokenizer(
                folders,
                allow_added_tokens=entry.allow_added_tokens,
                allow_special_tokens=entry.allow_special_tokens,
            )
        )
    yield from router_problems(spec.entry)
    yield from _caught(lambda: _check_policy(spec, output))
    if spec.tuning is None:
        yield from threshold_problems(spec)


def name_problems(spec: DeploymentSpec) -> Iterator[str]:
    """No models, or two of one name."""
    names = [spec.entry.name, *filter(None, [spec.entry.ensemble]), *spec.models]
    if len(set(names)) != len(names):
        yield f"model names must differ: {', '.join(names)}"
    if not spec.models:
        yield "models is empty; name at least one"
    for name, model in spec.models.items():
        if unknown := [other for other in model.load_after if other not in spec.models or other == name]:
            yield f"models.{name}.load_after names {unknown[0]!r}; known: {', '.join(spec.models)}"


def _check_policy(spec: DeploymentSpec, output: Path) -> None:
    """Builds the policy as the orchestrator will; its files are not read."""
    params = json.dumps(policy_params(spec.entry))
    try:
        load_policy(PolicySpec(spec.entry.policy, params), PolicyContext(tuple(spec.models), str(output.absolute())))
    except RouterError as exc:
        raise ConfigError(f"entry.policy {spec.entry.policy!r}: {exc}") from exc


def _model_problems(model: ModelSpec) -> Iterator[str]:
    if model.engine not in ENGINES:
        yield f"engine is {model.engine!r}; known: {', '.join(ENGINES)}"
    yield from _gpu_problems(model)
    yield from (f"options.{problem}" for problem in _option_problems(model))
    if model.checkpoint != VERSION_FOLDER and (Path(model.checkpoint) / "config.json").is_file():
        yield from _shape_problems(model)


def _gpu_problems(model: ModelSpec) -> Iterator[str]:
    if len(set(model.gpus)) != len(model.gpus) or min(model.gpus, default=0) < 0:
        yield f"gpus is {list(model.gpus)}; name each GPU once, from 0 on"
    if model.engine == "tensorrt_llm":
        parallel = model.options.get("tensor_parallel_size")
        if not model.gpus:
            yield "gpus is missing; tensorrt_llm needs the indices of the GPUs to use, for example [0]"
        elif parallel is not None and parallel != len(model.gpus):
            yield (
                f"options.tensor_parallel_size is {parallel}, but gpus names {len(model.gpus)}; name as many GPUs, or "
                "leave tensor_parallel_size out"
            )
    elif model.engine == "torch" and len(model.gpus) > 1:
        yield f"gpus is {list(model.gpus)}; the torch engine runs on one GPU; use tensorrt_llm for several"
    elif model.engine == "torch" and model.gpus and model.options.get("device") not in (None, f"cuda:{model.gpus[0]}"):
        yield f"gpus is {list(model.gpus)}, but options.device is {model.options['device']!r}; leave one out"
    elif model.engine == "emulated" and model.gpus:
        yield "gpus has no use with the engine emulated; remove it"


def _option_problems(model: ModelSpec) -> Iterator[str]:
    """Unknown names and wrong values, as the engine itself would refuse them at load."""
    if model.engine == "tensorrt_llm":
        yield from tensorrt_llm.problems(model.options)
    elif model.engine == "torch":
        from tokenrouter.engines.torch import TorchEngineConfig

        yield from _caught(lambda: TorchEngineConfig.from_mapping(model.options))
    elif model.engine == "emulated":
        from tokenrouter.engines.emulated import EmulatedConfig

        yield from _caught(lambda: msgspec.convert(model.options, EmulatedConfig))


def _shape_problems(model: ModelSpec) -> Iterator[str]:
    try:
        shape = read_shape(Path(model.checkpoint))
    except ConfigError as exc:
        yield f"checkpoint: {exc}"
        return
    parallel = max(1, len(model.gpus))
    if shape.heads % parallel:
        yield f"gpus names {parallel} GPUs, which do not divide the {shape.heads} attention heads; use 1, 2, 4 or 8"
    length = model.options.get("max_seq_len")
    if length is not None and shape.max_context is not None and int(length) > shape.max_context:
        yield f"options.max_seq_len is {length}; the model takes at most {shape.max_context}, lower it"


def _length_problems(spec: DeploymentSpec) -> Iterator[str]:
    """A pool has to hold at least one sequence of full length."""
    for name, model in spec.models.items():
        tokens = (model.options.get("kv_cache_config") or {}).get("max_tokens")
        length: Any = model.options.get("max_seq_len")
        if model.gpus and length is not None and tokens is not None and tokens < length:
            yield (
                f"models.{name}.options.max_seq_len is {length}, but only {tokens} KV tokens fit onto its GPUs; lower "
                "it, raise kv_budget.share, or use more GPUs"
            )
