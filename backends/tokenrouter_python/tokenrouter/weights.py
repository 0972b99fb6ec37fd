"""The weights of a checkpoint folder as they lie on disk: which files are loaded, and what their headers promise.

A safetensors file: 8 bytes (N, little-endian), N bytes of JSON (name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenrouter.checkpoint import read_json, refuse_pointer
from tokenrouter.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "model.embed_tokens.weight"
# Mistral's own format of the same weights, and adapters, lie beside them; nobody loads those.
_NOT_LOADED = ("consolidated", "adapter")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry in a header.

    Attributes:
        file: where it is.
        dtype: as safetensors names it: F32, BF16, F8_E4M3, I64 ...
        shape: sizes.
        size: bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    size: int

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether loading converts it to the model's dtype."""
        return self.dtype in ("F64", "F32", "F16", "BF16")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all files that are loaded, by name; empty if there are no safetensors files.

    Raises:
        ConfigError: a file is missing, a Git LFS pointer, or cut off; names it and the remedy.
    """
    return {name: tensor for path in weight_files(folder) for name, tensor in _header(path)}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that are loaded: model.safetensors, else those of its index, else all but other formats.

    Raises:
        ConfigError: see `stored_tensors`. Files of torch.save are held to the same, but not returned.
    """
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        shards = _shards(folder / index)
        if shards:
            return shards if index.startswith("model") else []
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file():
        refuse_pointer(pickled)
        return []
    return [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(_NOT_LOADED)]


def read_embedding(folder: Path) -> Tensor:
    """[V, H] input embedding of a checkpoint folder.

    Raises:
        ConfigError: no safetensors file has it.
    """
    from safetensors import safe_open

    stored = stored_tensors(folder).get(_EMBEDDING)
    if stored is None:
        raise ConfigError(f"{folder}: no safetensors file has {_EMBEDDING}; the router needs the input embedding")
    with safe_open(stored.file, framework="pt") as file:
        table: Tensor = file.get_tensor(_EMBEDDING)
    return table


def _shards(index: Path) -> list[Path]:
    """The files that an index names; empty if there is no index."""
    content = read_json(index)
    if not content:
        return []
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index} has no weight_map that names files; download it again")
    shards = sorted(set(names.values()))
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"{index} names {_listed(missing)}, which {_is_are(missing)} missing; download what is missing"
        )
    for name in shards:
        refuse_pointer(index.parent / name)
    return [index.parent / name for name in shards]


def _header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    refuse_pointer(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        available = path.stat().st_size - 8
        if length > available:
            raise ConfigError(f"{path} is no safetensors file, or is cut off within its header; download it again")
        try:
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
            tensors = {
                name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), end - start)
                for name, entry in header.items()
                if name != "__metadata__"
                for start, end in (entry["data_offsets"],)
            }
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{path} is no safetensors file: its header cannot be read; download it again") from exc
    promised = sum(tensor.size for tensor in tensors.values())
    if promised > available - length:
        raise ConfigError(
            f"{path} is cut off: its header promises {promised} bytes of weights, it has {available - length}; "
            "download it again"
        )
    yield from tensors.items()


def _listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _is_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
