"""Our file format for trained routers: one safetensors file, its metadata says what it is.

Metadata (safetensors allows text only):

=============  =====================================================================================================
``format``     ``tokenrouter-router``
``version``    ``1``
``kind``       ``r2r``, ``citer``, ``collm`` or ``query_level``
``threshold``  decimal text; absent if the trainer chose none
``models``     JSON list of the models it was trained for, small first; for error texts
``args``       JSON object of what tensor shapes do not tell, see each kind's reader
=============  =====================================================================================================

Tensor names of a kind are those of its source's checkpoint, so that conversion is lossless; see each reader.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenrouter.errors import ConfigError

FORMAT = "tokenrouter-router"
VERSION = 1
KINDS = ("r2r", "citer", "collm", "query_level")


@dataclass(frozen=True)
class RouterFile:
    """Contents of a router's file, whatever format it came from.

    Attributes:
        kind: one of `KINDS`.
        tensors: by name; torch tensors or numpy arrays, as asked for on loading.
        source: for error texts: where this was read from.
        threshold: the trainer's choice, or None.
        models: what it was trained for, small first; may be empty.
        args: what tensor shapes do not tell.
    """

    kind: str
    tensors: Mapping[str, Any]
    source: str = ""
    threshold: float | None = None
    models: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """For error texts: the file, and the models it was trained for if known."""
        return f"{self.source} (trained for {' + '.join(self.models)})" if self.models else self.source


def is_native(path: Path) -> bool:
    """Whether the name says that it is our format: a file that ends in ``.safetensors``."""
    return path.suffix == ".safetensors" and not path.is_dir()


def save_router(router: RouterFile, path: Path) -> None:
    """Writes the file, all or nothing. Tensors are torch tensors or numpy arrays, not mixed."""
    metadata = {"format": FORMAT, "version": str(VERSION), "kind": router.kind}
    metadata["models"] = msgspec.json.encode(router.models).decode()
    metadata["args"] = msgspec.json.encode(dict(router.args)).decode()
    if router.threshold is not None:
        metadata["threshold"] = repr(float(router.threshold))
    partial = path.with_name(path.name + ".partial")
    try:
        _save(router.tensors, partial, metadata)
        # safetensors makes the file private to its owner; a server usually runs as somebody else.
        partial.chmod(0o644)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _save(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str]) -> None:
    if all(hasattr(tensor, "is_contiguous") for tensor in tensors.values()):
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    else:
        from safetensors.numpy import save_file as save_arrays

        save_arrays(dict(tensors), path, metadata)


def load_router(path: Path, kind: str, *, framework: Literal["pt", "np"] = "pt", device: str = "cpu") -> RouterFile:
    """Reads a file in our format.

    Args:
        path: the file.
        kind: what it must be.
        framework: torch tensors (``pt``) or numpy arrays (``np``, needs no torch).
        device: where torch tensors go.

    Raises:
        ConfigError: not such a file, of a newer version, of another kind, or damaged.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as exc:
        raise ConfigError(f"{path}: reading router files needs the package safetensors ({exc})") from exc
    try:
        with safe_open(path, framework=framework, device=device) as file:
            metadata: dict[str, str] = file.metadata() or {}
            _check(metadata, path, kind)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as exc:
        raise ConfigError(f"{path} is no readable safetensors file: {exc}") from exc
    return _from_metadata(metadata, tensors, path)


def _check(metadata: dict[str, str], path: Path, kind: str) -> None:
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path} is a safetensors file but no router; convert it with tools.convert_router")
    if metadata.get("version") != str(VERSION):
        raise ConfigError(f"{path} has format version {metadata.get('version')}; this release reads {VERSION}")
    if metadata.get("kind") != kind:
        raise ConfigError(f"{path} holds a router of kind {metadata.get('kind')!r}, not {kind!r}")


def _from_metadata(metadata: dict[str, str], tensors: dict[str, Any], path: Path) -> RouterFile:
    try:
        threshold = metadata.get("threshold")
        return RouterFile(
            kind=metadata["kind"],
            tensors=tensors,
            source=str(path),
            threshold=None if threshold is None else float(threshold),
            models=msgspec.json.decode(metadata.get("models", "[]"), type=tuple[str, ...]),
            args=msgspec.json.decode(metadata.get("args", "{}"), type=dict[str, Any]),
        )
    except (ValueError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"{path}: damaged metadata: {exc}") from exc
