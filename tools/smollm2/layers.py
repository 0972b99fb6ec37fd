"""A small model from a large one: a few layers of its own, the large one's embedding and LM head."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.smollm2.checkpoints import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def shallow(large: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """The large model without all layers but these, which is where a small one starts from."""
    own = {NORM: large.tensors[NORM]}
    for place, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name, tensor in large.tensors.items():
            if name.startswith(prefix):
                own[f"model.layers.{place}.{name.removeprefix(prefix)}"] = tensor
    return with_layers(large, own)


def with_layers(large: Checkpoint, own: Mapping[str, Tensor]) -> Checkpoint:
    """A model with layers (and the norm after them) of its own, and the embedding of the large one."""
    config = copy.deepcopy(large.config)
    config.num_hidden_layers = len({found[1] for found in map(_LAYER.match, own) if found})
    return Checkpoint(config, {EMBEDDING: large.tensors[EMBEDDING], **own})


def write_layers(own: Mapping[str, Tensor], path: Path) -> None:
    """Writes a small model's own tensors: matrices with 8 bits a weight (Q8_0), norms as they are."""
    import gguf  # of requirements/smollm2.lock

    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in own.items():
        values = tensor.float().numpy()
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_layers(path: Path) -> dict[str, Tensor]:
    """What `write_layers` wrote, in float32; names are transformers', not llama.cpp's."""
    import gguf

    return {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(path).tensors
    }
