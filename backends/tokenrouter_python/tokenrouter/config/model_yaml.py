"""model.yaml of a version folder: which engine, which checkpoint, and the engine's options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenrouter.errors import ConfigError
from tokenrouter.yaml_files import load_yaml

ENGINES = ("emulated", "tensorrt_llm", "torch")
# `model` of a model.yaml whose checkpoint lies beside it.
VERSION_FOLDER = "."
# Of the torch engine, and what Triton is told where an engine's options name no batch size.
MAX_BATCH_SIZE = 16
# Of torch and emulated engines.
TOKENS_PER_BLOCK = 16


@dataclass(frozen=True)
class ModelYaml:
    """model.yaml of a version folder; what `SubserverConfig` takes from it.

    Attributes:
        options: everything else, which is the engine's.
    """

    checkpoint: Path
    options: dict[str, Any]
    engine: str = "torch"
    load_after: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> ModelYaml:
        """That of a version folder.

        Raises:
            ConfigError: names the file and the field.
        """
        path = folder / "model.yaml"
        options = load_yaml(path)
        engine = str(options.pop("engine", cls.engine))
        if engine not in ENGINES:
            raise ConfigError(f"{path}: engine is {engine!r}; known: {', '.join(ENGINES)}")
        checkpoint = (folder / str(options.pop("model", VERSION_FOLDER))).resolve()
        load_after = _model_names(options.pop("load_after", list(cls.load_after)), path)
        return cls(checkpoint, options, engine, load_after)


def _model_names(value: Any, path: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{path}: load_after is {value!r}; it is a list of model names")
    return tuple(value)
