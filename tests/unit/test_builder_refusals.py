"""What `python -m tools.build_repository` refuses, before anything is written and by the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import Edit, at, deployment, run
from tests.support.published_models import PUBLISHED, stub_tokenizer
from tests.support.repositories import emulated_spec
from tokenrouter.errors import ConfigError
from tools.build_repository.build import repository_files
from tools.build_repository.check import checked
from tools.build_repository.spec import load_spec

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        pytest.param(
            [at("models.small.engine", "vllm")], "models.small.engine is 'vllm'; known: emulated, tensor", id="engine"
        ),
        pytest.param(
            [at("models.small.checkpoint", "Qwen4")],
            "models.small.checkpoint: .*/checkpoints/Qwen4 has no config.json.*--checkpoints",
            id="checkpoint",
        ),
        pytest.param(
            [at("models.small.options.max_sq_len", 3)],
            r"models.small.options.max_sq_len is no argument of TensorRT-LLM",
            id="option",
        ),
        pytest.param(
            [at("models.small.options.kv_cache_config", {"tokens": 3})],
            r"models.small.options.kv_cache_config.tokens is no argument",
            id="nested-option",
        ),
        pytest.param(
            [at("models.small.options.disable_overlap_scheduler", False)],
            r"models.small.options.*disable_overlap_scheduler is False, but has to be True",
            id="fixed-option",
        ),
        pytest.param(
            [at("models.small.options.max_seq_len", 50_000)],
            "models.small.options.max_seq_len is 50000; the model takes at most 40960",
            id="too-long",
        ),
        pytest.param([at("models.small.options.dtype", "int3")], "dtype is 'int3'; known: auto", id="dtype"),
        pytest.param(
            [at("models.small.options.max_batch_size", "many")],
            "models.small.options.max_batch_size is 'many'; it is a whole number",
            id="no-number",
        ),
        pytest.param(
            [at("models.small.options.kv_cache_config", 5)],
            "models.small.options.kv_cache_config is 5; it is a table",
            id="no-table",
        ),
        pytest.param(
            [at("models.small.checkpoint", ...)],
            "models.small.checkpoint is missing; the KV budget",
            id="no-checkpoint",
        ),
        pytest.param([at("models.small.options.gpus", [0])], "options.gpus stands beside options", id="gpus-inside"),
        pytest.param([at("models.small.gpus", ...)], "models.small.gpus is missing", id="no-gpus"),
        pytest.param(
            [at("models.large.gpus", [0, 0])], r"models.large.gpus is \[0, 0\]; name each GPU once", id="same-gpu"
        ),
        pytest.param(
            [at("models.large.gpus", [0, 1, 2])],
            "models.large.gpus names 3 GPUs, which do not divide the 32 att",
            id="heads",
        ),
        pytest.param(
            [at("models.large.options.tensor_parallel_size", 4)],
            "models.large.options.tensor_parallel_size is 4, but gpus names 2",
            id="parallel",
        ),
        pytest.param(
            [at("models.large.engine", "torch")],
            "models.large.gpus is .*; the torch engine runs on one GPU",
            id="torch",
        ),
        pytest.param(
            [at("models.small.engine", "emulated"), at("models.small.options", {})],
            "models.small.gpus has no use",
            id="emulated",
        ),
        pytest.param(
            [at("kv_budget.share", 0.2)],
            r"GPU 0: its models do not fit into 16.0 GiB .*small 5.1, large 11.6",
            id="memory",
        ),
        pytest.param(
            [at("kv_budget.share", 0.21)],
            "models.small.options.max_seq_len is 4096, but only 320 KV tokens",
            id="short-pool",
        ),
        pytest.param(
            [at("kv_budget.gpu_memory_gib", {0: 80})], "gpu_memory_gib has no entry for GPU 1", id="unknown-memory"
        ),
        pytest.param([at("entry.policy", "r2d2")], "entry.policy 'r2d2': policy is 'r2d2'; known: citer", id="policy"),
        pytest.param(
            [at("entry.policy_params", {"treshold": 1})], "entry.policy 'r2r': .*unknown field `treshold`", id="knob"
        ),
        pytest.param(
            [at("entry.policy_params", {"threshold": 2})],
            r"policy_params.threshold is 2.0; it lies in \[0, 1\]",
            id="knob-value",
        ),
        pytest.param(
            [at("entry.routers", ...)],
            "policy_params.checkpoint is missing: r2r needs a trained router",
            id="no-router",
        ),
        pytest.param(
            [at("entry.routers.r2r", "other.pt")],
            "entry.routers.r2r: .*/checkpoints/other.pt does not exist",
            id="missing-router",
        ),
        pytest.param(
            [at("entry.routers.r2d2", "router.pt")], "entry.routers names the policy 'r2d2'", id="router-of-nobody"
        ),
        pytest.param(
            [at("entry.policy_params", {"checkpoint": "x.pt"})], "name a router each; remove one", id="two-routers"
        ),
        pytest.param(
            [at("models.small.batching", {"threshold": 3}), at("models.large.batching", {"threshold": 3})],
            "with 4 requests in flight the thresholds small=3, large=3 can deadlock",
            id="deadlock",
        ),
        pytest.param(
            [
                at("models.large.batching", {"batch_thresholds": {1: 1, 2: 2}}),
                at("models.small.batching", {"batch_thresholds": {2: 2}}),
            ],
            "with 2 requests in flight the thresholds small=2, large=2 can",
            id="deadlock-in-a-table",
        ),
        pytest.param(
            [at("models.large.batching", {"threshold": 0})],
            "models.large.batching: preferred_batch_size is 0",
            id="threshold",
        ),
        pytest.param(
            [at("models.large.batching", {"threshold": 3}), at("models.large.options.max_batch_size", 2)],
            "a threshold of 3 is never reached with options.max_batch_size 2",
            id="threshold-over-batch",
        ),
        pytest.param(
            [at("models.small.load_after", ["huge"])],
            "models.small.load_after names 'huge'; known: small, large",
            id="load-after",
        ),
        pytest.param(
            [at("tuning", {"profile": "nothing.yaml", "inflight": 4})],
            "tuning.profile: .*nothing.yaml: No such file",
            id="no-profile",
        ),
        pytest.param(
            [at("tuning", {"profile": str(CONFIGS / "profiles" / "me_qwen3_0.6b_8b_32b.yaml"), "inflight": 4})],
            "it is of the models small, medium, large, the deployment has",
            id="other-profile",
        ),
        pytest.param(
            [
                at("tuning", {"profile": str(CONFIGS / "profiles" / "r2r_qwen3_0.6b_32b.yaml"), "inflight": 4}),
                at("models.small.batching", {"threshold": 2}),
            ],
            "models.small.batching and tuning exclude each other",
            id="two-tunings",
        ),
        pytest.param(
            [at("entry.speculation", {"depth": 4})],
            "entry.speculation: the engine of models.small, tensorrt_llm, owns its decoding loop",
            id="speculation-of-an-engine",
        ),
        pytest.param(
            [at("entry.speculation", {"depth": 4096})],
            "entry.speculation.depth is 4096; models.small.options.max_seq_len is 4096: lower",
            id="depth-beyond-the-context",
        ),
        pytest.param(
            [at("entry.speculation", {}), at("entry.policy", "me"), at("entry.routers", ...)],
            "entry.speculation: policy 'me' cannot go ahead",
            id="speculation-of-a-policy",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path: Path, edits: list[Edit], says: str) -> None:
    path = deployment(tmp_path, *edits)
    with pytest.raises(ConfigError, match=says):
        checked(load_spec(path), tmp_path / "out", weights=False)
    result = run("--config", path, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        pytest.param([at("kv_budget.share", 1.5)], r"share lies in \(0, 1\].*kv_budget", id="share"),
        pytest.param([at("kv_budget.shares", 0.5)], r"unknown field `shares` - at `\$.kv_budget`", id="unknown"),
        pytest.param([at("tuning", {"profile": "p.yaml", "inflight": 0})], "inflight is at least 1", id="inflight"),
        pytest.param([at("models.small.gpu", [0])], "unknown field `gpu`", id="unknown-of-a-model"),
        pytest.param([at("models.small.batching", {"b": 1})], "unknown field `b`", id="unknown-of-batching"),
        pytest.param([at("entry.polcy", "x")], r"unknown field `polcy` - at `\$.entry`", id="unknown-of-the-entry"),
        pytest.param([at("model", {})], "unknown field `model`", id="unknown-at-the-top"),
        pytest.param([at("entry.policy", ...)], "missing required field `policy`", id="missing"),
        pytest.param([at("entry.speculation", {"depth": 0})], "speculation.depth is 0; it is at least 1", id="depth"),
        pytest.param(
            [at("entry.speculation", {"least_agreement": 1.5})],
            r"speculation.least_agreement is 1.5; it lies in \[0, 1\]",
            id="agreement",
        ),
        pytest.param([at("entry.max_inflight", "x")], r"\$.entry.max_inflight", id="type"),
    ],
)
def test_what_the_file_may_not_say_is_refused_by_its_path(tmp_path: Path, edits: list[Edit], says: str) -> None:
    path = deployment(tmp_path, *edits)
    with pytest.raises(ConfigError, match=f"{path}: .*{says}"):
        load_spec(path)


def test_problems_are_reported_together(tmp_path: Path) -> None:
    path = deployment(
        tmp_path, at("models.small.checkpoint", "x"), at("models.large.gpus", ...), at("entry.policy", "y")
    )
    with pytest.raises(ConfigError) as caught:
        checked(load_spec(path), tmp_path / "out", weights=False)
    text = str(caught.value)
    assert text.startswith("3 problems:\n  - ")
    assert all(field in text for field in ("models.small.checkpoint", "models.large.gpus", "entry.policy"))


def test_models_of_different_tokenizers_are_refused_by_the_token(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    stub_tokenizer("QwQ-32B").save(str(tmp_path / "checkpoints" / "Qwen3-8B" / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match="'small' and 'large' have different tokenizers: token id 257 is None and '<think>'"
    ):
        checked(load_spec(path), tmp_path, weights=False)
    accepted = deployment(tmp_path, at("entry.allow_added_tokens", True))
    stub_tokenizer("QwQ-32B").save(str(tmp_path / "checkpoints" / "Qwen3-8B" / "tokenizer.json"))
    checked(load_spec(accepted), tmp_path, weights=False)


def test_a_wider_padding_of_one_model_is_accepted(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    config = tmp_path / "checkpoints" / "Qwen3-8B" / "config.json"
    config.write_text(json.dumps({**PUBLISHED["Qwen3-8B"].config(), "vocab_size": 152_064}))
    checked(load_spec(path), tmp_path, weights=False)


def test_a_vocabulary_without_unused_ids_needs_some_named(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    config = tmp_path / "checkpoints" / "Qwen3-0.6B" / "config.json"
    config.write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"].config(), "vocab_size": 258}))
    with pytest.raises(ConfigError, match=r"models.small.options.handoff_ids: 2 token ids .* leaves 1 unused"):
        checked(load_spec(path), tmp_path, weights=False)
    named = deployment(tmp_path, at("models.small.options.handoff_ids", [3, 257]))
    config.write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"].config(), "vocab_size": 258}))
    checked(load_spec(named), tmp_path, weights=False)


@pytest.mark.parametrize(
    ("entry", "models", "says"),
    [
        pytest.param({}, (), "models is empty", id="no-models"),
        pytest.param({"policy_params": {}}, ("ensemble",), "names must differ", id="the-ensemble's-name"),
        pytest.param({"policy_params": {}}, ("tokenrouter",), "names must differ", id="the-entry's-name"),
    ],
)
def test_names_that_collide_are_refused(entry: dict[str, Any], models: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        repository_files(emulated_spec(entry=entry, models=models))
