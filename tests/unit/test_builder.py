"""`python -m tools.build_repository`: committed deployments, what is refused, and a built repository that answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.support.published_models import PUBLISHED, stub_tokenizer, write_stub, write_stubs
from tokenrouter.assembly import Entry
from tokenrouter.errors import ConfigError
from tokenrouter.offline import TokenRouter
from tokenrouter.repository import Repository
from tools.build_repository.__main__ import build
from tools.build_repository.build import repository_files, write_repository
from tools.build_repository.check import checked
from tools.build_repository.spec import DeploymentSpec, load_spec
from tools.dtmc.profile import load_profile
from tools.dtmc.search import search_table

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
FOLDERS = ("r2r", "citer", "rstitch", "collm", "me", "glimprouter", "query_level", "random")
DEPLOYMENTS = sorted(path for folder in FOLDERS for path in (CONFIGS / folder).glob("*.yaml"))
LINKED = "bert_gpt4_augmented"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stubs of all models, and a file for every router that a deployment names."""
    folder = write_stubs(tmp_path_factory.mktemp("checkpoints"))
    (folder / LINKED).mkdir()
    for path in DEPLOYMENTS:
        for router in yaml.safe_load(path.read_text())["entry"].get("routers", {}).values():
            if router != LINKED:
                (folder / router).parent.mkdir(parents=True, exist_ok=True)
                (folder / router).write_bytes(b"weights")
    return folder


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


# --- the committed deployments ----------------------------------------------------------------------------------------


def test_there_is_a_configuration_for_every_setting_of_the_paper() -> None:
    qwen = "Qwen3-0.6B_Qwen3-32B"
    distilled = "DeepSeek-R1-Distill-Qwen-1.5B_DeepSeek-R1-Distill-Qwen-32B"
    assert {name_of(path) for path in DEPLOYMENTS} == {
        *(f"r2r/Qwen3-{small}_Qwen3-{large}" for small in ("0.6B", "1.7B", "4B") for large in ("8B", "32B")),
        f"r2r/{distilled}",
        *(f"{policy}/{qwen}" for policy in ("citer", "rstitch", "collm", "query_level", "random")),
        "citer/Qwen2-1.5B_Qwen2-72B",
        "rstitch/L1-Qwen-1.5B-Short_QwQ-32B",
        "collm/Llama-2-7b_Llama-2-70b",
        "me/Qwen3-0.6B_Qwen3-8B_Qwen3-32B",
        "glimprouter/Qwen3-4B_Qwen3-32B",
    }


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=name_of)
def test_it_builds_from_its_checkpoints_and_is_read_back(path: Path, checkpoints: Path, tmp_path: Path) -> None:
    spec = load_spec(path, checkpoints)
    write_repository(checked(spec, tmp_path), tmp_path)
    repository = Repository(tmp_path)
    entry = repository.entry("tokenrouter")
    assert (entry.models, entry.policy.name) == (tuple(spec.models), path.parent.name)
    tokens = set()
    for name, model in spec.models.items():
        config = repository.model(name)
        options = config.engine_options
        assert (config.engine, config.checkpoint) == ("tensorrt_llm", (checkpoints / Path(model.checkpoint).name))
        assert options["gpus"] == list(model.gpus)
        assert options["tensor_parallel_size"] == len(model.gpus)
        batch, graphs = options["max_batch_size"], options["torch_compile_config"]
        # A step is at most the whole batch, each with the token that it always takes in, and the usual extend.
        assert graphs == {"enable_piecewise_cuda_graph": True, "capture_num_tokens": list(range(1, batch + 65))}
        assert {1, 2, 4, 8, batch} <= set(options["cuda_graph_config"]["batch_sizes"])
        assert options["kv_cache_config"]["max_tokens"] >= options["max_seq_len"]
        assert options["kv_cache_config"]["max_tokens"] % options["kv_cache_config"]["tokens_per_block"] == 0
        tokens.add(options["kv_cache_config"]["max_tokens"])
    shared = {
        gpu
        for model in spec.models.values()
        for gpu in model.gpus
        if sum(gpu in m.gpus for m in spec.models.values()) > 1
    }
    assert len(tokens) == (1 if shared else len(spec.models))
    first = repository.model("small")
    assert first.load_after == (("large",) if shared else ())


@pytest.mark.parametrize(
    "path", [path for path in DEPLOYMENTS if path.parent.name != "query_level" and "L1" not in path.name], ids=name_of
)
def test_the_orchestrator_starts_on_it(path: Path, checkpoints: Path, tmp_path: Path) -> None:
    """Tokenizers are compared, the policy is built, routers are found. (Two need more than a stub: a classifier, and
    end ids that lie beyond the small tokenizer of a stub.)"""
    write_repository(checked(load_spec(path, checkpoints), tmp_path), tmp_path)
    repository = Repository(tmp_path)
    entry = Entry(repository.entry("tokenrouter"), repository)
    assert entry.orchestrator() is not None


def test_the_thresholds_of_r2r_are_those_that_the_search_finds() -> None:
    rows = search_table(load_profile(CONFIGS / "profiles" / "r2r_qwen3_0.6b_32b.yaml"), 8)
    for folder in ("r2r", "random"):
        spec = load_spec(CONFIGS / folder / "Qwen3-0.6B_Qwen3-32B.yaml")
        for name, model in spec.models.items():
            table = model.batching.batch_thresholds
            found = [table[max(n for n in table if n <= row.inflight)] for row in rows]
            assert found == [row.thresholds[name] for row in rows], name


# --- what the builder does --------------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], object]


def deployment(folder: Path, *edits: Edit) -> Path:
    """A small deployment of two published models on the GPUs of the paper's layout, with edits."""
    content: dict[str, Any] = {
        "checkpoints": "checkpoints",
        "entry": {"policy": "r2r", "routers": {"r2r": "router.pt"}, "max_inflight": 4},
        "models": {
            name: {"engine": "tensorrt_llm", "checkpoint": checkpoint, "gpus": gpus, "options": {"max_seq_len": 4096}}
            for name, checkpoint, gpus in (("small", "Qwen3-0.6B", [0]), ("large", "Qwen3-8B", [0, 1]))
        },
    }
    for edit in edits:
        edit(content)
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        write_stub(folder / "checkpoints" / name, name)
    (folder / "checkpoints" / "router.pt").write_bytes(b"weights")
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def at(path: str, value: Any) -> Edit:
    """Sets the value at a dotted path; ... removes it."""
    *parents, key = path.split(".")

    def edit(content: dict[str, Any]) -> None:
        for parent in parents:
            content = content.setdefault(parent, {})
        if value is ...:
            del content[key]
        else:
            content[key] = value

    return edit


def run(*arguments: str | Path) -> Any:
    app = typer.Typer()
    app.command()(build)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_arguments_are_merged_with_the_deployments_own(tmp_path: Path) -> None:
    path = deployment(
        tmp_path,
        at("models.large.options.cuda_graph_config", None),
        at("models.large.options.kv_cache_config", {"host_cache_size": 1000, "dtype": "fp8"}),
        at("models.large.options.max_batch_size", 4),
        at("models.large.extend_tokens", 3),
    )
    small, large = checked(load_spec(path), tmp_path).models.values()
    assert large.options["cuda_graph_config"] is None
    assert large.options["torch_compile_config"]["capture_num_tokens"] == [1, 2, 3, 4, 5, 6, 7]
    assert large.options["kv_cache_config"]["host_cache_size"] == 1000
    assert large.options["kv_cache_config"]["enable_partial_reuse"] is True
    # 8-bit keys and values halve what a token of the large model takes: 114,688 + 147,456 / 2 / 2 bytes on GPU 0.
    free = 72 * 2**30 - 2 * 596_049_920 - 8_190_735_360 - 8 * 2**30
    assert large.options["kv_cache_config"]["max_tokens"] == free // (114_688 + 36_864) // 32 * 32
    assert small.options["kv_cache_config"]["max_tokens"] == large.options["kv_cache_config"]["max_tokens"]


def test_a_pool_set_by_hand_is_kept_and_counted(tmp_path: Path) -> None:
    path = deployment(tmp_path, at("models.small.options.kv_cache_config", {"max_tokens": 6000}))
    small, large = checked(load_spec(path), tmp_path).models.values()
    assert small.options["kv_cache_config"]["max_tokens"] == 6000
    assert large.options["kv_cache_config"]["max_tokens"] > 300_000


def test_the_torch_engine_gets_its_device_and_pool(tmp_path: Path) -> None:
    path = deployment(
        tmp_path, *(at(f"models.{name}.engine", "torch") for name in ("small", "large")), at("models.large.gpus", [1])
    )
    small, large = checked(load_spec(path), tmp_path).models.values()
    assert (small.options["device"], large.options["device"]) == ("cuda:0", "cuda:1")
    assert large.options["kv_cache_config"]["max_tokens"] % 16 == 0


def test_a_profile_gives_the_thresholds(tmp_path: Path) -> None:
    profile = CONFIGS / "profiles" / "r2r_qwen3_0.6b_32b.yaml"
    shutil.copy(profile, tmp_path / "profile.yaml")
    path = deployment(tmp_path, at("tuning", {"profile": "profile.yaml", "inflight": 4}))
    models = checked(load_spec(path), tmp_path).models
    best = search_table(load_profile(profile), 4)
    assert models["large"].batching.batch_thresholds == {row.inflight: row.thresholds["large"] for row in best}
    assert models["large"].batching.threshold == best[-1].thresholds["large"] == 3
    assert models["small"].batching.max_queue_delay_microseconds == 67_800


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    one, two = (repository_files(checked(load_spec(path), tmp_path)) for _ in range(2))
    assert list(one.items()) == list(two.items())


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
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path: Path, edits: list[Edit], says: str) -> None:
    path = deployment(tmp_path, *edits)
    with pytest.raises(ConfigError, match=says):
        checked(load_spec(path), tmp_path / "out")
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
    ],
)
def test_what_the_file_may_not_say_is_refused_by_its_path(tmp_path: Path, edits: list[Edit], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_spec(deployment(tmp_path, *edits))


def test_problems_are_reported_together(tmp_path: Path) -> None:
    path = deployment(
        tmp_path, at("models.small.checkpoint", "x"), at("models.large.gpus", ...), at("entry.policy", "y")
    )
    with pytest.raises(ConfigError) as caught:
        checked(load_spec(path), tmp_path / "out")
    text = str(caught.value)
    assert text.startswith("3 problems:\n  - ")
    assert all(field in text for field in ("models.small.checkpoint", "models.large.gpus", "entry.policy"))


def test_models_of_different_tokenizers_are_refused_by_the_token(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    stub_tokenizer("QwQ-32B").save(str(tmp_path / "checkpoints" / "Qwen3-8B" / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match="'small' and 'large' have different tokenizers: token id 257 is None and '<think>'"
    ):
        checked(load_spec(path), tmp_path)
    accepted = deployment(tmp_path, at("entry.allow_added_tokens", True))
    stub_tokenizer("QwQ-32B").save(str(tmp_path / "checkpoints" / "Qwen3-8B" / "tokenizer.json"))
    checked(load_spec(accepted), tmp_path)


def test_a_wider_padding_of_one_model_is_accepted(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    config = tmp_path / "checkpoints" / "Qwen3-8B" / "config.json"
    config.write_text(json.dumps({**PUBLISHED["Qwen3-8B"].config(), "vocab_size": 152_064}))
    checked(load_spec(path), tmp_path)


def test_a_vocabulary_without_unused_ids_needs_some_named(tmp_path: Path) -> None:
    path = deployment(tmp_path)
    config = tmp_path / "checkpoints" / "Qwen3-0.6B" / "config.json"
    config.write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"].config(), "vocab_size": 258}))
    with pytest.raises(ConfigError, match=r"models.small.options.handoff_ids: 2 token ids .* leaves 1 unused"):
        checked(load_spec(path), tmp_path)
    named = deployment(tmp_path, at("models.small.options.handoff_ids", [3, 257]))
    config.write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"].config(), "vocab_size": 258}))
    checked(load_spec(named), tmp_path)


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
    for text in ("small/config.pbtxt", 'backend: "tokenrouter_python"', "capture_num_tokens: [1, 2, 3", "max_tokens"):
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


def test_a_router_folder_is_linked_and_a_file_is_replaced(checkpoints: Path, tmp_path: Path) -> None:
    spec = checked(load_spec(CONFIGS / "query_level" / "Qwen3-0.6B_Qwen3-32B.yaml", checkpoints), tmp_path)
    for _ in range(2):
        write_repository(spec, tmp_path)
        assert (tmp_path / "tokenrouter" / "1" / "routers" / "query_level").readlink() == checkpoints / LINKED
    path = deployment(tmp_path)
    for weights in (b"old", b"new"):
        (tmp_path / "checkpoints" / "router.pt").write_bytes(weights)
        write_repository(checked(load_spec(path), tmp_path), tmp_path)
        assert (tmp_path / "tokenrouter" / "1" / "routers" / "r2r.pt").read_bytes() == weights


def test_an_operator_is_told_where_checkpoints_are_missing(tmp_path: Path) -> None:
    shown = run("--config", CONFIGS / "demo.yaml", "--output", tmp_path)
    assert shown.exit_code == 0
    assert f"note: put the checkpoint of small into {tmp_path}/small/1" in shown.output
