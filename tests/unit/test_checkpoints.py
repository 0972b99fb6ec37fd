"""Checkpoint folders as people have them: what is incomplete is refused at build and at load, by file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from tests.support.deployments import deployment, run
from tests.support.repositories import byte_tokenizer
from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.errors import ConfigError
from tokenrouter.policies.base import PolicyContext
from tokenrouter.policies.checkpoints import resolve
from tokenrouter.weights import read_embedding, stored_tensors
from tools.build_repository.model_checks import checkpoint_problems
from tools.build_repository.spec import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 256,
    "bos_token_id": None,
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 13476835\n"
Weights = dict[str, torch.Tensor]


def checkpoint(folder: Path, config: Any = None, **saving: Any) -> Path:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config or transformers.LlamaConfig(**SIZES))
    model.save_pretrained(folder, **saving)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def edit(folder: Path, change: Callable[[Weights], object]) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path) -> TorchEngine:
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=256)
    return TorchEngine.from_folder(folder, TorchEngineConfig(device="cpu", threads=1, kv_cache_config=cache))


def build(folder: Path, *, weights: bool = True) -> Any:
    """The result of building a deployment whose only model is this checkpoint."""
    model = {"engine": "torch", "checkpoint": str(folder), "options": {"device": "cpu"}}
    content = {"entry": {"policy": "single"}, "models": {"small": model}}
    path = folder.parent / "deployment.yaml"
    path.write_text(yaml.safe_dump(content))
    return run("--config", path, "--output", folder.parent / "out", weights=weights)


def refused(folder: Path, *says: str) -> None:
    """Loading and building refuse the folder in one line that has these texts; nothing is written."""
    with pytest.raises(ConfigError) as caught:
        load(folder)
    result = build(folder)
    assert result.exit_code == 2
    assert not (folder.parent / "out").exists()
    for text in (str(caught.value), result.stderr.strip()):
        assert "\n" not in text
        assert all(part in text for part in says), text


LAYER = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda w: w.pop("lm_head.weight"), "missing tensors: lm_head.weight", id="head"),
        pytest.param(lambda w: w.pop(LAYER), f"missing tensors: {LAYER}", id="layer"),
        pytest.param(
            lambda w: w.update({"score.weight": torch.zeros(3)}), "unexpected tensors: score.weight", id="unexpected"
        ),
        pytest.param(
            lambda w: w.update({LAYER: torch.zeros(32, 24)}),
            f"tensors of another shape: {LAYER} [32, 24] instead of [32, 32]",
            id="shape",
        ),
    ],
)
def test_weights_that_config_json_does_not_describe_are_refused(
    tmp_path: Path, change: Callable[[Weights], object], says: str
) -> None:
    folder = edit(checkpoint(tmp_path / "m"), change)
    refused(folder, f"{folder}/model.safetensors: {says}. The weights are not those that config.json describes")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None))
    edit(folder, lambda weights: weights.pop(next(name for name in weights if "experts.1" in name)))
    refused(folder, "missing tensors: model.layers.", "experts")


def test_missing_tensors_of_a_pickled_checkpoint_are_refused_at_load(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    load(folder)
    del weights["lm_head.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"missing tensors: lm_head\.weight"):
        load(folder)
    (folder / "pytorch_model.bin").write_text(POINTER)
    refused(folder, "pytorch_model.bin is a Git LFS pointer")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "foo"}, ("model_type is 'foo', which transformers", "does not know; take a model that")),
        (
            {"model_type": "x", "auto_map": {"AutoModel": "m.X"}},
            ("model_type is 'x'", "(auto_map), which is never run"),
        ),
        ({"hidden_size": "32"}, ("'hidden_size'", "str", "correct it")),
    ],
)
def test_a_config_json_that_makes_no_model_is_refused(
    tmp_path: Path, fields: dict[str, Any], says: tuple[str, ...]
) -> None:
    path = checkpoint(tmp_path / "m") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    refused(path.parent, f"{path}: ", *says)
    path.write_text("{")
    refused(path.parent, f"{path} is not valid JSON")


def test_sizes_that_do_not_go_together_are_refused_at_load(tmp_path: Path) -> None:
    gptj = transformers.GPTJConfig(vocab_size=257, n_embd=32, n_layer=1, n_head=4, n_positions=64, rotary_dim=64)
    with pytest.raises(ConfigError, match=r"gptj: transformers' own model fails on 8 tokens \(.*\); correct config"):
        load(checkpoint(tmp_path / "m", gptj))


def test_a_folder_without_weights_is_built_on_request_only(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    result = build(folder)
    assert (result.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert f"{folder} has a config.json and no weights; download them" in result.stderr
    assert build(folder, weights=False).exit_code == 0


def test_a_checkpoint_that_names_no_end_is_built_with_a_note(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", transformers.LlamaConfig(**SIZES | {"eos_token_id": None}))
    result = build(folder)
    assert result.exit_code == 0
    assert f"note: no file of {folder} names an end of responses" in result.stdout


def test_pickled_weights_are_refused_for_tensorrt_llm(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    model = ModelSpec(engine="tensorrt_llm", gpus=(0,), checkpoint=str(tmp_path))
    (problem,) = checkpoint_problems(model, tmp_path)
    assert "pytorch_model.bin only, which tensorrt_llm does not read; convert to safetensors" in problem


def test_a_multimodal_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    transformers.LlavaConfig(text_config=transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    refused(folder, "llava is multimodal (it has a text_config)", "take a model of text alone")
    transformers.ViTConfig(hidden_size=32, max_position_embeddings=64).save_pretrained(folder)
    refused(folder, "vit is no causal language model")


TIED = {"tie_word_embeddings": True}
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        pytest.param({}, lambda w: None, id="complete"),
        pytest.param(TIED, lambda w: None, id="tied"),
        pytest.param(TIED, lambda w: w.update({"lm_head.weight": w[EMBEDDING].clone()}), id="tied-and-stored"),
        pytest.param(TIED, lambda w: w.update({"lm_head.weight": w.pop(EMBEDDING)}), id="tied-to-the-head"),
        pytest.param(
            {},
            lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}),
            id="buffer-of-old-releases",
        ),
    ],
)
def test_what_transformers_ties_or_ignores_is_accepted(
    tmp_path: Path, fields: dict[str, Any], change: Callable[[Weights], object]
) -> None:
    folder = edit(checkpoint(tmp_path / "m", transformers.LlamaConfig(**SIZES, **fields)), change)
    load(folder)
    assert build(folder).exit_code == 0


def gpt2(folder: Path) -> Path:
    sizes = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return checkpoint(folder, transformers.GPT2Config(**sizes, eos_token_id=256, bos_token_id=None))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}), id="mask-buffer"),
        pytest.param(lambda w: w.update({"transformer.h.0.attn.masked_bias": torch.ones(1)}), id="old-mask-buffer"),
        pytest.param(
            lambda w: [w.update({name.removeprefix("transformer."): w.pop(name)}) for name in list(w)], id="no-prefix"
        ),
    ],
)
def test_gpt2_as_it_is_published_is_accepted(tmp_path: Path, change: Callable[[Weights], object]) -> None:
    folder = edit(gpt2(tmp_path / "m"), change)
    load(folder)
    assert build(folder).exit_code == 0


# Files


def test_a_git_lfs_pointer_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "model.safetensors").write_text(POINTER)
    refused(folder, f"{folder}/model.safetensors is a Git LFS pointer, not the file; run `git lfs pull` in {folder}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_so_is_one_in_the_place_of_a_small_file(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / name).write_text(POINTER)
    says = f"{name} is a Git LFS pointer"
    assert says in build(folder).stderr
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(folder) if name == "tokenizer.json" else load(folder)


def test_a_router_is_held_to_the_same(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    router = tmp_path / "checkpoints" / "router.pt"
    router.write_text(POINTER)
    result = run("--config", path, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert f"entry.routers.r2r: {router} is a Git LFS pointer" in result.stderr
    with pytest.raises(ConfigError, match="is a Git LFS pointer"):
        resolve(PolicyContext(("small",), str(tmp_path / "checkpoints")), "router.pt")


def test_the_input_embedding_is_read_from_the_file_that_is_loaded(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", max_shard_size="20KB")
    want = transformers.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert torch.equal(read_embedding(folder), want)
    edit(checkpoint(tmp_path / "n"), lambda weights: weights.pop(EMBEDDING))
    with pytest.raises(ConfigError, match=r"no safetensors file has model\.embed_tokens\.weight"):
        read_embedding(tmp_path / "n")


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (-5, "is cut off: its header promises"),
        (200, "is cut off within its header"),
        (3, "is no safetensors file"),
    ],
)
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int, says: str) -> None:
    folder = checkpoint(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, f"{path} ", says, "download it again")


def test_missing_shards_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3
    load(folder)
    everything = set(stored_tensors(folder))
    shards[1].unlink()
    refused(folder, f"model.safetensors.index.json names {shards[1].name}, which is missing; download")
    shards[1].write_text(POINTER)
    refused(folder, f"{shards[1]} is a Git LFS pointer")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == everything


def test_what_nobody_loads_may_lie_beside_the_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "consolidated.safetensors").write_text(POINTER)
    load(folder)
    assert build(folder).exit_code == 0
