"""config.json facts of the models that configs/ names, in one table, and stub checkpoints that carry them.

Source: config.json of the models' Hugging Face repositories (Qwen, deepseek-ai, l3lab, meta-llama), whose last part of
the name is the key. L1-Qwen-1.5B-Short is a fine-tuned DeepSeek-R1-Distill-Qwen-1.5B, whose shape is taken for it. The
two Co-LLM checkpoints are not published: they have the shape of their base model and the rows that the training adds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from perf.emulated.repository import byte_tokenizer

STUB_END_ID = 256


@dataclass(frozen=True)
class Published:
    """Fields of config.json; `parameters` is the number of weights as published with the model, or None."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    end_id: int
    tied: bool = False
    dtype: str = "bfloat16"
    parameters: int | None = None
    added: tuple[str, ...] = ()

    def config(self) -> dict[str, object]:
        """The file's content, as far as it matters here."""
        architecture = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[self.family]
        fields: dict[str, object] = {
            "architectures": [f"{architecture}ForCausalLM"],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype,
            "eos_token_id": self.end_id,
        }
        # Qwen2 and Llama state no head_dim; it is hidden / heads there.
        return fields | ({"head_dim": self.head_dim} if self.family == "qwen3" else {})


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, **more: object) -> Published:
    return Published("qwen3", hidden, intermediate, layers, heads, 8, 128, 151_936, 40_960, 151_645, **more)  # type: ignore[arg-type]


_QWEN2_SMALL = ("qwen2", 1536, 8960, 28, 12, 2, 128, 151_936, 131_072, 151_643)

PUBLISHED = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True, parameters=596_049_920),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True, parameters=1_720_574_976),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True, parameters=4_022_468_096),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32, parameters=8_190_735_360),
    "Qwen3-32B": _qwen3(5120, 25_600, 64, 64, parameters=32_762_123_264),
    "Qwen2-1.5B": Published(*_QWEN2_SMALL, tied=True, parameters=1_543_714_304),
    "Qwen2-72B": Published("qwen2", 8192, 29_568, 80, 64, 8, 128, 152_064, 131_072, 151_643, parameters=72_706_203_648),
    "DeepSeek-R1-Distill-Qwen-1.5B": Published(*_QWEN2_SMALL, parameters=1_777_088_000),
    "DeepSeek-R1-Distill-Qwen-32B": Published(
        "qwen2", 5120, 27_648, 64, 40, 8, 128, 152_064, 131_072, 151_643, parameters=32_763_876_352
    ),
    "L1-Qwen-1.5B-Short": Published(*_QWEN2_SMALL, parameters=1_777_088_000),
    "QwQ-32B": Published(
        "qwen2", 5120, 27_648, 64, 40, 8, 128, 152_064, 40_960, 151_645, parameters=32_763_876_352, added=("<think>",)
    ),
    "Llama-2-7b-hf": Published(
        "llama", 4096, 11_008, 32, 32, 32, 128, 32_000, 4096, 2, dtype="float16", parameters=6_738_415_616
    ),
    "Llama-2-70b-hf": Published(
        "llama", 8192, 28_672, 80, 64, 8, 128, 32_000, 4096, 2, dtype="float16", parameters=68_976_648_192
    ),
    # The base model's rows up to the last token of its tokenizer, and the deferral row.
    "Qwen3-0.6B-CoLLM": Published(
        "qwen3", 1024, 3072, 28, 16, 8, 128, 151_670, 40_960, 151_645, tied=True, added=("<|defer|>",)
    ),
    "Llama-2-7b-CoLLM": Published(
        "llama", 4096, 11_008, 32, 32, 32, 128, 32_002, 4096, 2, dtype="float16", added=("[PAD]", "<|defer|>")
    ),
}


def stub_tokenizer(name: str) -> Tokenizer:
    """One token per byte, an end token, and what the model adds to its family's tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in PUBLISHED[name].added])
    return tokenizer


def write_stub(folder: Path, name: str) -> Path:
    """A checkpoint folder without weights: true config.json and a small tokenizer.

    generation_config.json names the small tokenizer's end token, since ids have to lie inside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name].config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STUB_END_ID}))
    stub_tokenizer(name).save(str(folder / "tokenizer.json"))
    return folder


def write_stubs(folder: Path) -> Path:
    """Every model of the table under its name. Returns the folder."""
    for name in PUBLISHED:
        write_stub(folder / name, name)
    return folder
