"""Weights and KV bytes, computed by hand from config.json. Every sum is written out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_files_count_more_than_the_formula(tmp_path: Path) -> None:
    folder = write_stub(tmp_path / "m", "Qwen3-0.6B", weight_bytes=1000)
    assert read_shape(folder).weight_bytes() == 1000
    assert read_shape(folder).weight_bytes(dtype="float32") == 2000
    (folder / "model.safetensors.index.json").unlink()
    (folder / "a.safetensors").write_bytes(b"x" * 30)
    (folder / "b.safetensors").write_bytes(b"x" * 12)
    assert read_shape(folder).weight_bytes() == 42


def test_quantized_weights_are_taken_from_their_files_alone(tmp_path: Path) -> None:
    folder = write_stub(tmp_path / "m", "Qwen3-0.6B")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantized weights without safetensors files"):
        read_shape(folder).weight_bytes()
    (folder / "a.safetensors").write_bytes(b"x" * 30)
    assert read_shape(folder).weight_bytes(dtype="float32") == 30


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
