"""Weights and KV bytes, computed by hand from config.json. Every sum is written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.published_models import PUBLISHED, write_stub
from tokenrouter.errors import ConfigError
from tools.build_repository.shapes import ModelShape, read_shape


def shape(folder: Path, name: str) -> ModelShape:
    return read_shape(write_stub(folder / name, name))


# KV of one token: 2 (K and V) * layers * KV heads * head size * 2 bytes.
KV_BYTES = {
    "Qwen3-0.6B": 2 * 28 * 8 * 128 * 2,  # 114,688
    "Qwen3-8B": 2 * 36 * 8 * 128 * 2,  # 147,456
    "Qwen3-32B": 2 * 64 * 8 * 128 * 2,  # 262,144
    "Llama-2-7b-hf": 2 * 32 * 32 * 128 * 2,  # 524,288: every head has its own keys and values
    "Llama-2-70b-hf": 2 * 80 * 8 * 128 * 2,  # 327,680
    "Qwen2-1.5B": 2 * 28 * 2 * 128 * 2,  # 28,672
    "Qwen2-72B": 2 * 80 * 8 * 128 * 2,  # 327,680
}

# Weights: embeddings (once if tied) + layers * (q + o, k + v, gate + up + down, two norms, extras) + last norm.
PARAMETERS = {
    # 155,582,464 + 28 * (4,194,304 + 2,097,152 + 9,437,184 + 2,048 + 256) + 1,024
    "Qwen3-0.6B": 151_936 * 1024
    + 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128)
    + 1024,
    # 2 * 622,329,856 + 36 * (33,554,432 + 8,388,608 + 150,994,944 + 8,192 + 256) + 4,096
    "Qwen3-8B": 2 * 151_936 * 4096
    + 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288 + 2 * 4096 + 2 * 128)
    + 4096,
    # 64 heads of 128 are 8,192 wide, wider than the 5,120 of the hidden state.
    "Qwen3-32B": 2 * 151_936 * 5120
    + 64 * (2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25_600 + 2 * 5120 + 2 * 128)
    + 5120,
    "Llama-2-7b-hf": 2 * 32_000 * 4096 + 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008 + 2 * 4096) + 4096,
    "Llama-2-70b-hf": 2 * 32_000 * 8192
    + 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192)
    + 8192,
    # Qwen2: biases of q (1,536), k and v (256 each).
    "Qwen2-1.5B": 151_936 * 1536
    + 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960 + 2 * 1536 + 1536 + 2 * 256)
    + 1536,
    "Qwen2-72B": 2 * 152_064 * 8192
    + 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 29_568 + 2 * 8192 + 8192 + 2 * 1024)
    + 8192,
}


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_of_a_token(tmp_path: Path, name: str) -> None:
    assert shape(tmp_path, name).kv_bytes_per_token() == KV_BYTES[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_weights_computed_by_hand(tmp_path: Path, name: str) -> None:
    found = shape(tmp_path, name)
    assert found.parameters == PARAMETERS[name]
    assert found.weight_bytes() == 2 * PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name, model in PUBLISHED.items() if model.parameters])
def test_weights_are_as_many_as_published(tmp_path: Path, name: str) -> None:
    assert shape(tmp_path, name).parameters == PUBLISHED[name].parameters


def test_tensor_parallelism_splits_kv_heads_down_to_one(tmp_path: Path) -> None:
    qwen = shape(tmp_path, "Qwen2-1.5B")  # 2 KV heads
    one_head = 2 * 28 * 1 * 128 * 2
    assert [qwen.kv_bytes_per_token(tensor_parallel_size=n) for n in (1, 2, 4)] == [2 * one_head, one_head, one_head]


def test_dtypes_scale_weights_and_kv(tmp_path: Path) -> None:
    small = shape(tmp_path, "Qwen3-0.6B")
    assert small.weight_bytes(dtype="float32") == 4 * small.parameters
    assert small.kv_bytes_per_token(dtype="fp8") == KV_BYTES["Qwen3-0.6B"] // 2
    with pytest.raises(ConfigError, match="dtype is 'int3'; known: auto, float32"):
        small.weight_bytes(dtype="int3")


def put(path: Path, dtype: str, **shapes: list[int]) -> None:
    """A safetensors file of zeros."""
    from safetensors.torch import save_file

    save_file({name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in shapes.items()}, path)


def test_what_will_be_loaded_counts_more_than_the_formula(tmp_path: Path) -> None:
    folder = write_stub(tmp_path / "m", "Qwen3-0.6B")
    put(folder / "a.safetensors", "bfloat16", x=[5, 100])
    put(folder / "b.safetensors", "float32", y=[100])  # becomes bfloat16, as config.json says
    put(folder / "consolidated.safetensors", "bfloat16", z=[10_000])
    assert read_shape(folder).weight_bytes() == 2 * 600
    assert read_shape(folder).weight_bytes(dtype="float32") == 4 * 600
    index = {"metadata": {"total_size": 9}, "weight_map": {"x": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shape(folder).weight_bytes() == 2 * 500
    put(folder / "model.safetensors", "bfloat16", w=[7])
    assert read_shape(folder).weight_bytes() == 2 * 7


def test_without_a_dtype_in_config_json_the_headers_say_it(tmp_path: Path) -> None:
    folder = write_stub(tmp_path / "m", "Qwen3-0.6B")
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    put(folder / "model.safetensors", "bfloat16", x=[500])
    assert read_shape(folder).weight_bytes() == 2 * 500
    assert read_shape(folder).kv_bytes_per_token() == KV_BYTES["Qwen3-0.6B"]


def test_quantized_weights_are_taken_from_their_files_alone(tmp_path: Path) -> None:
    folder = write_stub(tmp_path / "m", "Qwen3-0.6B")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantized weights without safetensors files"):
        read_shape(folder).weight_bytes()
    put(folder / "a.safetensors", "float8_e4m3fn", x=[30])
    assert read_shape(folder).weight_bytes(dtype="float32") == 30


@pytest.mark.parametrize(
    ("config", "layers", "heads", "kv_heads", "head_dim", "context"),
    [
        (transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=64), 2, 4, 4, 8, 64),
        (transformers.GPTJConfig(n_layer=2, n_head=4, n_embd=32, n_positions=64), 2, 4, 4, 8, 64),
        (transformers.OPTConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32), 2, 4, 4, 8, 2048),
        # Gemma's heads are not hidden / heads wide, and its file need not say so.
        (transformers.GemmaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32), 2, 4, 16, 256, 8192),
    ],
)
def test_other_families_name_their_sizes_otherwise(
    tmp_path: Path, config: Any, layers: int, heads: int, kv_heads: int, head_dim: int, context: int
) -> None:
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = read_shape(tmp_path)
    assert (found.layers, found.heads, found.kv_heads, found.head_dim) == (layers, heads, kv_heads, head_dim)
    assert found.max_context == context


def test_a_model_of_text_and_images_has_its_sizes_in_a_part(tmp_path: Path) -> None:
    text = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    transformers.LlavaConfig(text_config=text).save_pretrained(tmp_path)
    found = read_shape(tmp_path)
    assert (found.family, found.layers, found.heads, found.kv_heads, found.hidden) == ("llama", 2, 4, 2, 32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"num_hidden_layers": None}, "num_hidden_layers is null", id="missing"),
        pytest.param({"hidden_size": "big"}, 'hidden_size is "big"; a whole number', id="no-number"),
    ],
)
def test_a_bad_field_of_config_json_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    folder = write_stub(tmp_path / "m", "Qwen3-0.6B")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=f"config.json: {says}"):
        read_shape(folder)


def test_an_unknown_family_needs_files(tmp_path: Path) -> None:
    folder = write_stub(tmp_path / "m", "Qwen3-0.6B")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type is 'mamba'; without safetensors files"):
        read_shape(folder).weight_bytes()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_shape(tmp_path)
