"""CITER's confidence network (arXiv 2502.01976): Linear, BatchNorm, ReLU, Linear, Linear, sigmoid, folded when loaded.

BatchNorm uses its running statistics and folds into the first layer; nothing stands between the last two linear layers,
so they fold into one row. Source: aiming-lab/CITER, src/models/conf_model.py (layer order and key names). The file is a
bare state dict (``.pth``) or our format with the same tensor names; `args` of our format: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenrouter.errors import ConfigError
from tokenrouter.policies.checkpoints.native import RouterFile, is_native, load_router
from tokenrouter.policies.checkpoints.shapes import Tensors
from tokenrouter.policies.checkpoints.unpickle import load_plain

if TYPE_CHECKING:
    from torch import Tensor

_EPSILON = 1e-5
_COUNTER = "mlp.1.num_batches_tracked"


@dataclass(frozen=True)
class CiterNetwork:
    """score = sigmoid(v . relu(W h + b) + c), the confidence that the small model is good enough.

    Attributes:
        weight, bias: [M, H] and [M], first layer and BatchNorm.
        row, offset: [M] and a scalar, the last two layers.
        threshold: stored in the file, or None.
        origin: for error texts.
    """

    weight: Tensor
    bias: Tensor
    row: Tensor
    offset: Tensor
    threshold: float | None
    origin: str

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.weight.shape[1])

    def score(self, hidden: Tensor) -> Tensor:
        """[B] float32 in (0, 1) for hidden states [B, H] float32."""
        inner = (hidden @ self.weight.T + self.bias).relu()
        return (inner @ self.row + self.offset).sigmoid()


def read_official(path: Path) -> RouterFile:
    """A bare state dict; the source stores no threshold.

    Raises:
        ConfigError: refused by `load_plain`, or no dictionary of tensors.
    """
    content = load_plain(path)
    if not (isinstance(content, dict) and all(hasattr(value, "shape") for value in content.values())):
        raise ConfigError(f"{path} is no CITER checkpoint: expected a bare state dict of tensors")
    return RouterFile(kind="citer", tensors=content, source=str(path))


def load_citer(path: Path, device: str = "cpu") -> CiterNetwork:
    """The folded network in a file of either format.

    Raises:
        ConfigError: see `read_official`, `native.load_router` and `build`.
    """
    return build(load_router(path, "citer") if is_native(path) else read_official(path), device)


def build(router: RouterFile, device: str = "cpu") -> CiterNetwork:
    """Folds the layers, in float64.

    Raises:
        ConfigError: a tensor is missing, superfluous or of another shape.
    """
    tensors = Tensors(router)
    first_weight, first_bias = (tensor.double() for tensor in tensors.linear("mlp.0", None, None))
    middle = first_weight.shape[0]
    scale, shift = (tensor.double() for tensor in tensors.norm("mlp.1", middle))
    mean = tensors.take("mlp.1.running_mean", middle).double()
    variance = tensors.take("mlp.1.running_var", middle).double()
    second_weight, second_bias = (
        tensor.double() for tensor in tensors.linear("mlp.4", None, middle, why="rows of mlp.0.weight")
    )
    last_weight, last_bias = (
        tensor.double() for tensor in tensors.linear("linear", 1, second_weight.shape[0], why="rows of mlp.4.weight")
    )
    tensors.finish(_COUNTER)
    scale = scale / (variance + _EPSILON).sqrt()
    return CiterNetwork(
        weight=(first_weight * scale[:, None]).float().to(device),
        bias=((first_bias - mean) * scale + shift).float().to(device),
        row=(last_weight @ second_weight)[0].float().to(device),
        offset=(last_weight @ second_bias + last_bias)[0].float().to(device),
        threshold=router.threshold,
        origin=router.origin,
    )
