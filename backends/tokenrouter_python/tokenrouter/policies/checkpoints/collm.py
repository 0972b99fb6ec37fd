"""Co-LLM's deferral row (arXiv 2403.03870): one extra row of the small model's LM head.

Sources of the row g, with d = sigmoid(g . h):

* our format, tensor ``deferral.weight`` [H];
* a tensor saved by torch.save, [1, H] or [H] (the source's ``gperp_init.bin``);
* a Hugging Face folder of the fine-tuned small model, whose last vocabulary row is the deferral token
  (clinicalml/co-llm, collm/training). If the folder's tokenizer files name ``<|defer|>``, its id must be that last row;
  it is not in a matrix that was padded after the training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenrouter.errors import ConfigError
from tokenrouter.policies.checkpoints.native import RouterFile, is_native, load_router
from tokenrouter.policies.checkpoints.shapes import Tensors
from tokenrouter.policies.checkpoints.unpickle import load_plain

if TYPE_CHECKING:
    from torch import Tensor

TENSOR = "deferral.weight"
DEFER_TOKEN = "<|defer|>"
# The LM head, or the input embedding that it is tied to.
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True)
class DeferralRow:
    """The row.

    Attributes:
        weight: [H] float32.
        threshold: stored in the file, or None.
        origin: for error texts.
    """

    weight: Tensor
    threshold: float | None
    origin: str

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.weight.shape[0])

    def probability(self, hidden: Tensor) -> Tensor:
        """[B] float32: d for hidden states [B, H] float32."""
        return (hidden @ self.weight).sigmoid()


def read_official(path: Path) -> RouterFile:
    """The row out of a folder of the fine-tuned small model, or a saved [1, H] tensor.

    Raises:
        ConfigError: nothing of that kind, or the deferral token is not the last row.
    """
    row = _row_of_folder(path) if path.is_dir() else load_plain(path)
    if not isinstance(row, torch.Tensor):
        raise ConfigError(f"{path} is no deferral row: expected one tensor of shape [1, H] or [H]")
    if row.dim() == 2 and row.shape[0] == 1:
        row = row[0]
    return RouterFile(kind="collm", tensors={TENSOR: row.contiguous()}, source=str(path))


def load_deferral(path: Path, device: str = "cpu") -> DeferralRow:
    """The row in a file or folder of any of the three formats.

    Raises:
        ConfigError: see `read_official`, `native.load_router` and `build`.
    """
    return build(load_router(path, "collm") if is_native(path) else read_official(path), device)


def build(router: RouterFile, device: str = "cpu") -> DeferralRow:
    """The row of a file.

    Raises:
        ConfigError: the tensor is missing or no vector, or there are others.
    """
    tensors = Tensors(router, device)
    weight = tensors.take(TENSOR, None, why="one weight per hidden unit of the small model")
    tensors.finish()
    return DeferralRow(weight, router.threshold, router.origin)


def _row_of_folder(folder: Path) -> Tensor:
    for name in _HEADS:
        row, rows = _last_row(folder, name)
        if row is not None:
            break
    else:
        raise ConfigError(f"{folder} has neither {' nor '.join(_HEADS)} in safetensors or pytorch_model.bin files")
    token_id = _defer_id(folder)
    if token_id is not None and token_id != rows - 1:
        raise ConfigError(
            f"{folder}: {DEFER_TOKEN} has id {token_id}, but the last of the {rows} rows of {name} is {rows - 1}; the "
            "matrix was padded after the training. Resize it to the tokenizer's length"
        )
    return row


def _last_row(folder: Path, name: str) -> tuple[Tensor | None, int]:
    """The last row of a matrix and its number of rows; only that row is read from safetensors files."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                rows = int(part.get_shape()[0])
                return part[rows - 1], rows
    for path in sorted(folder.glob("pytorch_model*.bin")):
        content = load_plain(path)
        if name in content:
            return content[name][-1].clone(), len(content[name])
    return None, 0


def _defer_id(folder: Path) -> int | None:
    """Id of the deferral token according to the folder's tokenizer files, or None if they do not tell."""
    added: Any = _json(folder / "added_tokens.json") or {}
    if DEFER_TOKEN in added:
        return int(added[DEFER_TOKEN])
    tokenizer: Any = _json(folder / "tokenizer.json") or {}
    ids = [token["id"] for token in tokenizer.get("added_tokens", []) if token.get("content") == DEFER_TOKEN]
    return int(ids[0]) if ids else None


def _json(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"{path} is no valid JSON: {exc}") from exc
