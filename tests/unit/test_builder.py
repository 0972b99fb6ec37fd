"""`python -m tools.build_repository`: what it fills in, and a built repository that answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.deployments import at, deployment, run
from tokenrouter.offline import TokenRouter
from tokenrouter.repository import Repository
from tools.build_repository.build import BUILT, built_deployment, repository_files
from tools.build_repository.check import checked
from tools.build_repository.spec import BatchingSpec, DeploymentSpec, load_spec
from tools.build_repository.tuning import plan_edits, write_edits
from tools.dtmc.profile import load_profile
from tools.dtmc.search import search_table

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def test_arguments_are_merged_with_the_deployments_own(tmp_path: Path) -> None:
    path = deployment(
        tmp_path,
        at("models.large.options.cuda_graph_config", None),
        at("models.large.options.kv_cache_config", {"host_cache_size": 1000, "dtype": "fp8"}),
        at("models.large.options.max_batch_size", 4),
        at("models.large.extend_tokens", 3),
    )
    small, large = checked(load_spec(path), tmp_path, weights=False).models.values()
    assert large.options["cuda_graph_config"] is None
    assert large.options["torch_compile_config"]["capture_num_tokens"] == [1, 2, 4, 7]
    assert large.options["kv_cache_config"]["host_cache_size"] == 1000
    assert large.options["kv_cache_config"]["enable_partial_reuse"] is True
    # 8-bit keys and values halve what a token of the large model takes: 114,688 + 147,456 / 2 / 2 bytes on GPU 0.
    free = 72 * 2**30 - 2 * 596_049_920 - 8_190_735_360 - 8 * 2**30
    assert large.options["kv_cache_config"]["max_tokens"] == free // (114_688 + 36_864) // 32 * 32
    assert small.options["kv_cache_config"]["max_tokens"] == large.options["kv_cache_config"]["max_tokens"]


def test_a_pool_set_by_hand_is_kept_and_counted(tmp_path: Path) -> None:
    path = deployment(tmp_path, at("models.small.options.kv_cache_config", {"max_tokens": 6000}))
    small, large = checked(load_spec(path), tmp_path, weights=False).models.values()
    assert small.options["kv_cache_config"]["max_tokens"] == 6000
    assert large.options["kv_cache_config"]["max_tokens"] > 300_000


def test_the_torch_engine_gets_its_device_and_pool(tmp_path: Path) -> None:
    path = deployment(
        tmp_path, *(at(f"models.{name}.engine", "torch") for name in ("small", "large")), at("models.large.gpus", [1])
    )
    small, large = checked(load_spec(path), tmp_path, weights=False).models.values()
    assert (small.options["device"], large.options["device"]) == ("cuda:0", "cuda:1")
    assert large.options["kv_cache_config"]["max_tokens"] % 16 == 0


def test_a_profile_gives_the_thresholds(tmp_path: Path) -> None:
    profile = CONFIGS / "profiles" / "r2r_qwen3_0.6b_32b.yaml"
    shutil.copy(profile, tmp_path / "profile.yaml")
    path = deployment(tmp_path, at("tuning", {"profile": "profile.yaml", "inflight": 4}))
    models = checked(load_spec(path), tmp_path, weights=False).models
    best = search_table(load_profile(profile), 4)
    assert models["large"].batching.batch_thresholds == {row.inflight: row.thresholds["large"] for row in best}
    assert models["large"].batching.threshold == best[-1].thresholds["large"] == 3
    assert models["small"].batching.max_queue_delay_microseconds == 67_800


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    one, two = (repository_files(checked(load_spec(path), tmp_path, weights=False)) for _ in range(2))
    assert list(one.items()) == list(two.items())


def test_where_checkpoints_lie_can_be_said_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = deployment(tmp_path, at("checkpoints", "written"))

    def small(spec: DeploymentSpec) -> str:
        return spec.models["small"].checkpoint

    assert small(load_spec(path)) == str(tmp_path / "written" / "Qwen3-0.6B")
    monkeypatch.setenv("TOKENROUTER_CHECKPOINTS", "/elsewhere")
    assert small(load_spec(path)) == "/elsewhere/Qwen3-0.6B"
    assert small(load_spec(path, Path("/asked"))) == "/asked/Qwen3-0.6B"
    assert load_spec(path, Path("/asked")).entry.routers == {"r2r": "/asked/router.pt"}


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_everything_and_writes_nothing(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    shown = run("--config", path, "--output", tmp_path / "out", "--dry-run")
    assert shown.exit_code == 0
    assert not (tmp_path / "out").exists()
    assert "    routers/\n      r2r.pt  (copy of " in shown.output
    for text in ("small/config.pbtxt", 'backend: "tokenrouter_python"', "capture_num_tokens: [1, 2, 4", "max_tokens"):
        assert text in shown.output
    assert run("--config", path, "--output", tmp_path / "out", "--dry-run").output == shown.output


def test_a_built_repository_answers_with_its_router(tmp_path: Path) -> None:
    """Real models and a real router, from a YAML file alone."""
    demo = ROOT / "model_repository"
    options = {"dtype": "float32", "max_seq_len": 1024, "kv_cache_config": {"max_tokens": 4096}}
    content = {
        "checkpoints": str(demo),
        "entry": {
            "policy": "r2r",
            "policy_params": {"threshold": 0.3},
            "routers": {"r2r": "tokenrouter/1/routers/r2r.safetensors"},
        },
        "models": {name: {"checkpoint": f"{name}/1", "options": options} for name in ("small", "large")},
    }
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    built = tmp_path / "built"
    assert run("--config", tmp_path / "deployment.yaml", "--output", built).exit_code == 0
    placed = built / "tokenrouter" / "1" / "routers" / "r2r.safetensors"
    assert placed.read_bytes() == (demo / "tokenrouter" / "1" / "routers" / "r2r.safetensors").read_bytes()
    params = json.loads(Repository(built).entry("tokenrouter").policy.params)
    assert params == {"threshold": 0.3, "checkpoint": "tokenrouter/1/routers/r2r.safetensors"}
    prompts = ["Start 91: -38, *2, -47 ="]
    with TokenRouter.from_repository(built) as router:
        answer = router.generate(prompts, max_tokens=64)[0]
    with TokenRouter.from_repository(demo) as router:
        wanted = router.generate(prompts, max_tokens=64, policy="r2r", policy_params='{"threshold": 0.3}')[0]
    assert (answer.tokens, answer.tokens_by_model) == (wanted.tokens, wanted.tokens_by_model)
    assert answer.text.endswith("#### 59")


def test_building_again_does_not_undo_a_tuning_in_silence(tmp_path: Path) -> None:
    path, out = deployment(tmp_path), tmp_path / "out"
    assert run("--config", path, "--output", out).exit_code == 0
    write_edits(plan_edits(out, {"large": BatchingSpec(3, 1000)}).values())
    tuned = {file: file.read_text() for file in (out / BUILT, out / "large" / "config.pbtxt")}
    for more in ([], ["--dry-run"]):
        refused = run("--config", path, "--output", out, *more)
        assert refused.exit_code == 2
        assert f"error: {out / BUILT}: the thresholds of large were tuned there" in refused.stderr
        assert "--keep-tuning keeps them" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert run("--config", out / BUILT, "--output", out).exit_code == 0, "that file has them"
    assert run("--config", path, "--output", out, "--keep-tuning").exit_code == 0
    assert {file: file.read_text() for file in tuned} == tuned
    assert run("--config", path, "--output", out, "--drop-tuning").exit_code == 0
    assert built_deployment(out).models["large"].batching == BatchingSpec()
    assert "preferred_batch_size: [ 1 ]" in (out / "large" / "config.pbtxt").read_text()


def test_an_operator_is_told_where_checkpoints_are_missing(tmp_path: Path) -> None:
    shown = run("--config", CONFIGS / "demo.yaml", "--output", tmp_path)
    assert shown.exit_code == 0
    assert f"note: put the checkpoint of small into {tmp_path}/small/1" in shown.output
