"""R2R's router network (arXiv 2505.21600): reads official ``.pt`` checkpoints and our format, and runs it.

Block(x) = dim_change(x) + W3 gelu(W0 norm(x)); the backbone is a projection, blocks, a norm and a linear layer. Classes
differ in what goes in; every size comes from tensor shapes, because shipped configurations state wrong ones. Source:
thu-nics/R2R, r2r/models/router.py (classes and key names). `args` of our format: ``model_type``, ``normalize_input``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tokenrouter.errors import ConfigError
from tokenrouter.policies.checkpoints.native import RouterFile, is_native, load_router
from tokenrouter.policies.checkpoints.shapes import Tensors
from tokenrouter.policies.checkpoints.unpickle import load_plain

if TYPE_CHECKING:
    from torch import Tensor

Affine = tuple["Tensor", "Tensor"]
Inputs = Callable[[Mapping[str, "Tensor"]], "Tensor"]
EMBEDDING = "token_embeddings.weight"
_POSITIONS = "backbone.position_embedding"

# Class (lower case) -> its inputs, in the order of concatenation.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "hiddenstatestokenlmheadlogitsclassifier": ("hidden", "token", "logits"),
    "hiddenstatestokenlmheadclassifier": ("hidden", "token"),
    "hiddenstateslogitsclassifier": ("hidden", "logits"),
    "logitsclassifier": ("logits",),
    "hiddenstatesclassifier": ("hidden",),
    "hiddenstatesclassifierwithlmhead": ("lm_head",),
}


def read_official(path: Path) -> RouterFile:
    """An official checkpoint.

    A dictionary with `model_type`, `init_args`, `common_args` {`threshold`} and `state_dict`; other keys are ignored.

    Raises:
        ConfigError: refused by `load_plain`, or no such dictionary.
    """
    content = load_plain(path)
    if not (isinstance(content, dict) and isinstance(content.get("state_dict"), dict)):
        raise ConfigError(f"{path} is no R2R checkpoint: expected a dictionary with model_type and state_dict")
    init_args = content.get("init_args") or {}
    threshold = (content.get("common_args") or {}).get("threshold")
    small = init_args.get("pretrained_model_name")
    return RouterFile(
        kind="r2r",
        tensors=content["state_dict"],
        source=str(path),
        threshold=None if threshold is None else float(threshold),
        models=(str(small),) if small else (),
        args={
            "model_type": str(content.get("model_type")),
            "normalize_input": bool(init_args.get("normalize_input", False)),
        },
    )


def load_r2r(path: Path, device: str = "cpu") -> R2RNetwork:
    """The network in a file of either format.

    Raises:
        ConfigError: see `read_official`, `native.load_router` and `build`.
    """
    return build(load_router(path, "r2r") if is_native(path) else read_official(path), device)


@dataclass(frozen=True)
class _Block:
    norm: Affine
    up: Affine
    down: Affine
    dim_change: Affine | None

    def __call__(self, x: Tensor) -> Tensor:
        inner = functional.linear(functional.gelu(functional.linear(_normed(x, self.norm), *self.up)), *self.down)
        return inner + (x if self.dim_change is None else functional.linear(x, *self.dim_change))


@dataclass(frozen=True)
class _Backbone:
    projection: Affine
    position: Tensor | None
    blocks: tuple[_Block, ...]
    norm: Affine
    output: Affine

    def __call__(self, x: Tensor) -> Tensor:
        x = functional.linear(x, *self.projection)
        if self.position is not None:
            x = x + self.position
        for block in self.blocks:
            x = block(x)
        return functional.linear(_normed(x, self.norm), *self.output)


@dataclass(frozen=True)
class R2RNetwork:
    """Probability that the small model's token diverges.

    Attributes:
        inputs: features by name (``hidden`` [B, H], ``token`` [B, E], ``logits`` [B, K]) -> [B, D] for the backbone.
        backbone: [B, D] -> [B, 1] or [B, 3].
        sizes: H, E and K of the features that are used; K is how many of the largest logits, in falling order.
        embedding: [V, E] if the file has the table, else None: the small model's own input embedding is used.
        threshold: stored in the file, or None.
        origin: for error texts.
    """

    inputs: Inputs
    backbone: _Backbone
    sizes: Mapping[str, int]
    embedding: Tensor | None
    threshold: float | None
    origin: str

    @property
    def hidden_size(self) -> int | None:
        """H, or None if hidden states are not used."""
        return self.sizes.get("hidden")

    def probability(self, features: Mapping[str, Tensor]) -> Tensor:
        """p(divergent): sigmoid of one output, or class 2 of three.

        Args:
            features: those named in `sizes`, float32; see `inputs`.

        Returns:
            [B] float32.
        """
        output = self.backbone(self.inputs(features))
        return output[:, 0].sigmoid() if output.shape[1] == 1 else output.softmax(-1)[:, 2]


def build(router: RouterFile, device: str = "cpu") -> R2RNetwork:
    """The network of a file, sizes from tensor shapes.

    Raises:
        ConfigError: a class without a rule, or a tensor missing, superfluous or of another shape.
    """
    model_type = str(router.args.get("model_type"))
    names = CLASSES.get(model_type.lower())
    if names is None:
        raise ConfigError(f"{router.origin}: model_type {model_type!r} cannot be used; usable: {', '.join(CLASSES)}")
    normalize = bool(router.args.get("normalize_input", False))
    tensors = Tensors(router, device)
    table = tensors.take(EMBEDDING, None, None) if "token" in names and EMBEDDING in tensors else None
    if len(names) > 1:
        inputs, sizes, width = _combined(tensors, names, normalize, None if table is None else table.shape[1])
    else:
        inputs, sizes, width = _SINGLE[names[0]](tensors, normalize)
    backbone = _backbone(tensors, width)
    tensors.finish(EMBEDDING)
    return R2RNetwork(inputs, backbone, sizes, table, router.threshold, router.origin)


def _combined(
    tensors: Tensors, names: tuple[str, ...], normalize: bool, embedding: int | None
) -> tuple[Inputs, dict[str, int], int]:
    """Features (normalised if `normalize`), logits projected to H, concatenated, then `combined_projection`."""
    combined = tensors.linear("combined_projection", None, None)
    logits = tensors.linear("logits_projection", None, None) if "logits" in names else None
    sizes = _sizes(tensors, names, combined[0].shape[1], None if logits is None else logits[0].shape, embedding)
    hidden_norm = tensors.norm("layer_norm_hidden_states", sizes["hidden"]) if normalize else None
    token_norm = tensors.norm("layer_norm_token", sizes["token"]) if normalize and "token" in names else None

    def inputs(features: Mapping[str, Tensor]) -> Tensor:
        parts = [_normed(features["hidden"], hidden_norm)]
        if "token" in names:
            parts.append(_normed(features["token"], token_norm))
        if logits is not None:
            parts.append(functional.linear(_probabilities(features["logits"], normalize), *logits))
        return functional.linear(torch.cat(parts, dim=-1), *combined)

    return inputs, sizes, combined[0].shape[0]


def _sizes(
    tensors: Tensors, names: tuple[str, ...], width: int, logits: torch.Size | None, embedding: int | None
) -> dict[str, int]:
    """H, E and K; `width` is the number of inputs of `combined_projection`, `logits` the shape [H, K]."""
    sizes = {}
    if logits is not None:
        sizes["hidden"], sizes["logits"] = logits
        rest = width - 2 * sizes["hidden"]
    else:
        # Hidden and embedding are equally wide unless the file's own table says otherwise.
        sizes["hidden"] = width // 2 if embedding is None else width - embedding
        rest = width - sizes["hidden"]
    if "token" in names:
        sizes["token"] = rest
    if (rest < 1 or embedding not in (None, rest)) if "token" in names else rest != 0:
        raise ConfigError(
            f"{tensors.origin}: combined_projection.weight takes {width} inputs, which does not fit {' + '.join(names)}"
            f" with hidden size {sizes['hidden']}" + (f" and {EMBEDDING} of width {embedding}" if embedding else "")
        )
    return sizes


def _logits(tensors: Tensors, normalize: bool) -> tuple[Inputs, dict[str, int], int]:
    projection = tensors.linear("logits_projection", None, None)

    def inputs(features: Mapping[str, Tensor]) -> Tensor:
        return functional.linear(_probabilities(features["logits"], normalize), *projection)

    return inputs, {"logits": projection[0].shape[1]}, projection[0].shape[0]


def _hidden(tensors: Tensors, normalize: bool) -> tuple[Inputs, dict[str, int], int]:
    projection = tensors.linear("hidden_states_projection", None, None)
    width, size = projection[0].shape
    norm = tensors.norm("layer_norm", size) if normalize else None

    def inputs(features: Mapping[str, Tensor]) -> Tensor:
        return functional.linear(_normed(features["hidden"], norm), *projection)

    return inputs, {"hidden": size}, width


def _lm_head(tensors: Tensors, normalize: bool) -> tuple[Inputs, dict[str, int], int]:
    """A copy of the LM head, its largest outputs in falling order if the projection takes fewer, then a projection."""
    head = tensors.linear("lm_head", None, None)
    projection = tensors.linear("post_lm_projection", None, None)
    vocabulary, size = head[0].shape
    width, top = projection[0].shape
    norm = tensors.norm("layer_norm", size) if normalize else None

    def inputs(features: Mapping[str, Tensor]) -> Tensor:
        logits = functional.linear(_normed(features["hidden"], norm), *head)
        return functional.linear(logits if top == vocabulary else logits.topk(top, dim=-1).values, *projection)

    return inputs, {"hidden": size}, width


_SINGLE = {"logits": _logits, "hidden": _hidden, "lm_head": _lm_head}


def _backbone(tensors: Tensors, inputs: int) -> _Backbone:
    projection = tensors.linear("backbone.input_projection", None, inputs, why="output of the projection before it")
    size = projection[0].shape[0]
    position = None
    if _POSITIONS in tensors:
        # One position per call, so the table's first row is what the source adds.
        position = tensors.take(_POSITIONS, None, size)[0]
    blocks: list[_Block] = []
    while f"backbone.blocks.{len(blocks)}.layer_norm.weight" in tensors:
        block, size = _block(tensors, f"backbone.blocks.{len(blocks)}", size)
        blocks.append(block)
    norm = tensors.norm("backbone.output_layer.0", size)
    output = tensors.linear("backbone.output_layer.1", None, size, why="size of the last block")
    if output[0].shape[0] not in (1, 3):
        raise ConfigError(
            f"{tensors.origin}: backbone.output_layer.1.weight has {output[0].shape[0]} rows; expected 1 or 3 classes"
        )
    return _Backbone(projection, position, tuple(blocks), norm, output)


def _block(tensors: Tensors, name: str, size: int) -> tuple[_Block, int]:
    norm = tensors.norm(f"{name}.layer_norm", size)
    up = tensors.linear(f"{name}.mlp.0", None, size, why="size of the block before")
    down = tensors.linear(f"{name}.mlp.3", None, up[0].shape[0], why=f"rows of {name}.mlp.0.weight")
    next_size = down[0].shape[0]
    change = tensors.linear(f"{name}.dim_change", next_size, size) if next_size != size else None
    return _Block(norm, up, down, change), next_size


def _probabilities(logits: Tensor, normalize: bool) -> Tensor:
    return logits.softmax(-1) if normalize else logits


def _normed(x: Tensor, norm: Affine | None) -> Tensor:
    return x if norm is None else functional.layer_norm(x, (x.shape[-1],), *norm)
