"""R2R's router network (arXiv 2505.21600): reads official ``.pt`` checkpoints and our format, and runs it.

Block(x) = dim_change(x) + W3 gelu(W0 norm(x)); the backbone is a projection, blocks, a norm and a linear layer. Classes
differ in what goes in; every size comes from tensor shapes, because shipped configurations state wrong ones. Source:
thu-nics/R2R, r2r/models/router.py (classes and key names). `args` of our format: ``model_type``, ``normalize_input``,
``neural_window_size``.

Three kinds of classes are unfinished there, and follow what their source says about them:

* HiddenStatesTokenClassifierWithLMHead: its constructor raises. What stands behind that line stores an LM head and a
  projection after it, which its own `forward` does not read; both may be in a file, and are ignored.
* MultiLogitsClassifier and MultiHiddenStatesClassifier take the last `neural_window_size` positions, oldest first,
  logits as the K / window largest of each. How they are fed: r2r/utils/switching.py, NeuralMultiInputSwitching, whose
  constructor raises. That code softmaxes normalised logits once more than the class and its training do; not followed.
* MultiClass...: constructors without `forward`. Layers are applied in the order of the classes for one output; the
  output is what the three-way training takes (script/train/train_router.py): probabilities, by the softmax that the
  class puts last, or by ours with `apply_softmax` false. The strategy's second softmax over them is not followed.
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


@dataclass(frozen=True)
class RouterClass:
    """What sets a class of the source apart.

    Attributes:
        inputs: in the order of concatenation.
        window: whether they are those of several positions.
        outputs: rows that its last layer may have.
        unread: linear layers that a file holds for nothing.
    """

    inputs: tuple[str, ...]
    window: bool = False
    outputs: tuple[int, ...] = (1, 3)
    unread: tuple[str, ...] = ()


CLASSES: Mapping[str, RouterClass] = {
    "HiddenStatesTokenLMHeadLogitsClassifier": RouterClass(("hidden", "token", "logits")),
    "HiddenStatesTokenLMHeadClassifier": RouterClass(("hidden", "token")),
    "HiddenStatesLogitsClassifier": RouterClass(("hidden", "logits")),
    "LogitsClassifier": RouterClass(("logits",)),
    "HiddenStatesClassifier": RouterClass(("hidden",)),
    "HiddenStatesClassifierWithLMHead": RouterClass(("lm_head",)),
    "HiddenStatesTokenClassifierWithLMHead": RouterClass(("hidden", "token"), unread=("lm_head", "post_lm_projection")),
    "MultiLogitsClassifier": RouterClass(("logits",), window=True),
    "MultiHiddenStatesClassifier": RouterClass(("hidden",), window=True),
    "MultiClassLogitsClassifier": RouterClass(("logits",), outputs=(3,)),
    "MultiClassHiddenStatesClassifier": RouterClass(("hidden",), outputs=(3,)),
    "MultiClassHiddenStatesClassifierWithLMHead": RouterClass(("lm_head",), outputs=(3,)),
}
# The source finds classes by either spelling.
_BY_NAME = {name.lower(): kind for name, kind in CLASSES.items()}
# neural_window_size where init_args do not say.
_WINDOW = 3


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
            "neural_window_size": init_args.get("neural_window_size", _WINDOW),
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
            With a window of W > 1 positions a feature is [B, W, H] or [B, W, K], the oldest first.
        backbone: [B, D] -> [B, 1] or [B, 3].
        sizes: H, E and K of the features that are used; K is how many of the largest logits, in falling order.
        window: W, how many positions it sees; 1 for most classes.
        model_type: class, for error texts.
        embedding: [V, E] if the file has the table, else None: the small model's own input embedding is used.
        threshold: stored in the file, or None.
        origin: for error texts.
    """

    inputs: Inputs
    backbone: _Backbone
    sizes: Mapping[str, int]
    window: int
    model_type: str
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
    kind = _BY_NAME.get(model_type.lower())
    if kind is None:
        raise ConfigError(f"{router.origin}: model_type {model_type!r} is no class of R2R; known: {', '.join(CLASSES)}")
    normalize = bool(router.args.get("normalize_input", False))
    window = _window(router) if kind.window else 1
    tensors = Tensors(router, device)
    table = tensors.take(EMBEDDING, None, None) if "token" in kind.inputs and EMBEDDING in tensors else None
    if len(kind.inputs) > 1:
        width = None if table is None else table.shape[1]
        inputs, sizes, width = _combined(tensors, kind.inputs, normalize, width)
    else:
        inputs, sizes, width = _SINGLE[kind.inputs[0]](tensors, normalize, window)
    backbone = _backbone(tensors, width, kind.outputs)
    unread = [f"{layer}.{part}" for layer in kind.unread for part in ("weight", "bias")]
    tensors.finish(EMBEDDING, *unread)
    return R2RNetwork(inputs, backbone, sizes, window, model_type, table, router.threshold, router.origin)


def _window(router: RouterFile) -> int:
    """How many positions the network sees.

    Raises:
        ConfigError: no such number.
    """
    window = router.args.get("neural_window_size", _WINDOW)
    if not isinstance(window, int) or window < 1:
        raise ConfigError(
            f"{router.origin}: init_args.neural_window_size is {window!r}; it is how many positions the network was "
            "trained on, a whole number from 1 on"
        )
    return window


def _per_position(tensors: Tensors, name: str, columns: int, window: int) -> int:
    """How many inputs of a layer are one position's.

    Raises:
        ConfigError: they do not share out evenly.
    """
    if columns % window:
        raise ConfigError(
            f"{tensors.origin}: {name} takes {columns} inputs, which is no multiple of init_args.neural_window_size "
            f"{window}; state the number of positions that it was trained on"
        )
    return columns // window


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


def _logits(tensors: Tensors, normalize: bool, window: int) -> tuple[Inputs, dict[str, int], int]:
    """Positions are normalised by themselves, and go in side by side."""
    projection = tensors.linear("logits_projection", None, None)
    width, columns = projection[0].shape
    size = _per_position(tensors, "logits_projection.weight", columns, window)

    def inputs(features: Mapping[str, Tensor]) -> Tensor:
        return functional.linear(_probabilities(features["logits"], normalize).reshape(-1, columns), *projection)

    return inputs, {"logits": size}, width


def _hidden(tensors: Tensors, normalize: bool, window: int) -> tuple[Inputs, dict[str, int], int]:
    """Likewise. The source's own norm over several positions is as wide as all of them, and cannot be applied."""
    projection = tensors.linear("hidden_states_projection", None, None)
    width, columns = projection[0].shape
    size = _per_position(tensors, "hidden_states_projection.weight", columns, window)
    norm = tensors.norm("layer_norm", size, why="hidden size of one position") if normalize else None

    def inputs(features: Mapping[str, Tensor]) -> Tensor:
        return functional.linear(_normed(features["hidden"], norm).reshape(-1, columns), *projection)

    return inputs, {"hidden": size}, width


def _lm_head(tensors: Tensors, normalize: bool, window: int) -> tuple[Inputs, dict[str, int], int]:
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


def _backbone(tensors: Tensors, inputs: int, outputs: tuple[int, ...]) -> _Backbone:
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
    if output[0].shape[0] not in outputs:
        raise ConfigError(
            f"{tensors.origin}: backbone.output_layer.1.weight has {output[0].shape[0]} rows; expected "
            f"{' or '.join(map(str, outputs))}: one for p(divergent), or three for match, neutral and divergent"
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
