"""What is wrong with one model's entry; fields are named relative to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from tokenrouter.config.model_yaml import ENGINES
from tokenrouter.engines.tensorrt_llm.config import OWN_KEYS, unknown
from tokenrouter.errors import ConfigError, RouterError
from tokenrouter.weights import stored_tensors
from tools.build_repository.shapes import read_shape
from tools.build_repository.spec import ModelSpec

_COUNTS = ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size")
_KV_COUNTS = ("tokens_per_block", "max_tokens")
_TABLES = ("kv_cache_config", "scheduler_config", "cuda_graph_config", "torch_compile_config")


def caught(check: Callable[[], object]) -> list[str]:
    """The problem that a check raises, if any."""
    try:
        check()
    except (RouterError, msgspec.ValidationError) as exc:
        return [str(exc)]
    return []


def model_problems(model: ModelSpec) -> Iterator[str]:
    """Everything that can be seen without the other models."""
    if model.engine not in ENGINES:
        yield f"engine is {model.engine!r}; known: {', '.join(ENGINES)}"
    yield from _gpu_problems(model)
    yield from (f"options.{problem}" for problem in _option_problems(model))


def checkpoint_problems(model: ModelSpec, folder: Path, *, weights: bool = True) -> Iterator[str]:
    """What is wrong with the files of a checkpoint folder that has a config.json; the emulated engine reads none.

    Args:
        weights: whether they have to be there.
    """
    if model.engine not in ("torch", "tensorrt_llm"):
        return
    problems = caught(lambda: _refuse_weightless(model, folder)) if weights else caught(lambda: stored_tensors(folder))
    problems = problems or caught(lambda: _refuse_unloadable(model, folder))
    yield from (f"checkpoint: {problem}" for problem in problems)
    if model.gpus and not problems:
        yield from _shape_problems(model, folder)


def _refuse_weightless(model: ModelSpec, folder: Path) -> None:
    """Raises ConfigError if no file has weights that the engine reads, or one that has is broken."""
    pickled = [path.name for path in sorted(folder.glob("pytorch_model*.bin"))]
    if stored_tensors(folder) or (pickled and model.engine == "torch"):
        return
    if pickled:
        raise ConfigError(
            f"{folder} has weights in {pickled[0]} only, which {model.engine} does not read; convert to safetensors"
        )
    raise ConfigError(
        f"{folder} has a config.json and no weights; download them (model.safetensors, or the shards that its index "
        "names), or build with --without-weights if they come later"
    )


def _refuse_unloadable(model: ModelSpec, folder: Path) -> None:
    """Raises ConfigError for what loading would refuse, minutes later and perhaps on another machine."""
    own = model.engine == "torch"
    if not own and not (stored_tensors(folder) and find_spec("torch") and find_spec("transformers")):
        return
    from tokenrouter.engines.torch.complete import check_complete
    from tokenrouter.engines.torch.config import TorchEngineConfig
    from tokenrouter.engines.torch.loading import position_limit, read_config, refuse_unsupported

    try:
        config = read_config(folder)
    except ConfigError:
        if own:
            raise
        return  # TensorRT-LLM knows models that transformers does not
    if own:
        settings = TorchEngineConfig.from_mapping(model.options)
        refuse_unsupported(config, settings.resolve_seq_len(position_limit(config)))
    check_complete(folder, config)


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
    if wrong := list(_type_problems(model)):
        yield from wrong
    elif model.engine == "tensorrt_llm":
        yield from unknown({key: value for key, value in model.options.items() if key not in OWN_KEYS})
        if "gpus" in model.options:
            yield "gpus stands beside options, not in it"
    elif model.engine == "torch":
        from tokenrouter.engines.torch.config import TorchEngineConfig

        yield from caught(lambda: TorchEngineConfig.from_mapping(model.options))
    elif model.engine == "emulated":
        from tokenrouter.engines.emulated.engine import EmulatedConfig

        yield from caught(lambda: msgspec.convert(model.options, EmulatedConfig))


def _type_problems(model: ModelSpec) -> Iterator[str]:
    """Numbers and tables that the builder itself reads."""
    for key in _TABLES:
        if not isinstance(model.options.get(key), (Mapping, type(None))):
            yield f"{key} is {model.options[key]!r}; it is a table, or null"
            return
    kv = model.options.get("kv_cache_config") or {}
    numbers = {key: model.options.get(key) for key in _COUNTS}
    numbers |= {f"kv_cache_config.{key}": kv.get(key) for key in _KV_COUNTS}
    for key, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{key} is {value!r}; it is a whole number of at least 1"


def _shape_problems(model: ModelSpec, folder: Path) -> Iterator[str]:
    try:
        shape = read_shape(folder)
    except ConfigError as exc:
        yield f"checkpoint: {exc}"
        return
    parallel = max(1, len(model.gpus))
    if shape.heads % parallel:
        yield f"gpus names {parallel} GPUs, which do not divide the {shape.heads} attention heads; use 1, 2, 4 or 8"
    length = model.options.get("max_seq_len")
    if isinstance(length, int) and shape.max_context is not None and length > shape.max_context:
        yield f"options.max_seq_len is {length}; the model takes at most {shape.max_context}, lower it"
