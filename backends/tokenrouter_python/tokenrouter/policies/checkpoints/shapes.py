"""Takes tensors out of a router's file and says exactly what is wrong if one is missing or has another shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenrouter.errors import ConfigError
from tokenrouter.policies.checkpoints.native import RouterFile

if TYPE_CHECKING:
    from torch import Tensor


class Tensors:
    """The tensors of a file, each to be taken once.

    Args:
        router: the file.
        device: where the tensors go, as float32.

    Attributes:
        origin: the file, for error texts.
    """

    def __init__(self, router: RouterFile, device: str = "cpu") -> None:
        self._tensors = dict(router.tensors)
        self._names = sorted(self._tensors)
        self.origin = router.origin
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int | None, why: str = "") -> Tensor:
        """A tensor as float32 on the device.

        Args:
            name: its name.
            shape: expected size by dimension; None allows any.
            why: where the expectation comes from.

        Raises:
            ConfigError: missing, no floating-point tensor, or of another shape.
        """
        expected = f"[{', '.join('*' if size is None else str(size) for size in shape)}]" + (f" ({why})" if why else "")
        found = self._tensors.pop(name, None)
        if not isinstance(found, torch.Tensor):
            raise ConfigError(
                f"{self.origin}: tensor {name!r} of shape {expected} is missing; the file has {', '.join(self._names)}"
            )
        fits = len(found.shape) == len(shape) and all(
            size is None or size == actual for size, actual in zip(shape, found.shape, strict=True)
        )
        if not (fits and found.is_floating_point()):
            raise ConfigError(
                f"{self.origin}: tensor {name!r} has shape {list(found.shape)} and type {found.dtype}; expected floats "
                f"of shape {expected}"
            )
        return found.detach().to(self._device, torch.float32)

    def linear(self, name: str, rows: int | None, columns: int | None, why: str = "") -> tuple[Tensor, Tensor]:
        """Weight [rows, columns] and bias [rows] of a linear layer."""
        weight = self.take(f"{name}.weight", rows, columns, why=why)
        return weight, self.take(f"{name}.bias", weight.shape[0], why=f"as {name}.weight")

    def norm(self, name: str, width: int, why: str = "") -> tuple[Tensor, Tensor]:
        """Weight [width] and bias [width] of a layer norm."""
        return self.take(f"{name}.weight", width, why=why), self.take(f"{name}.bias", width, why=why)

    def finish(self, *ignored: str) -> None:
        """Refuses tensors that nobody took, except `ignored`: the file is of another architecture.

        Raises:
            ConfigError: names them.
        """
        left = sorted(self._tensors.keys() - set(ignored))
        if left:
            raise ConfigError(f"{self.origin}: unexpected tensors {', '.join(left)}; is it of another architecture?")
