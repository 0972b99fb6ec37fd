"""The committed deployments build, are read back, and give the committed repository."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from tests.support.deployments import deployment
from tests.support.published_models import write_stubs
from tokenrouter.assembly import Entry
from tokenrouter.repository import Repository
from tools.build_repository.build import BUILT, built_deployment, repository_files, write_repository
from tools.build_repository.check import checked
from tools.build_repository.spec import load_spec
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
    finished = checked(spec, tmp_path, weights=False)
    write_repository(finished, tmp_path)
    assert repository_files(built_deployment(tmp_path)) == repository_files(finished), "what was built is kept"
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
        sizes = graphs.pop("capture_num_tokens")
        assert graphs == {"enable_piecewise_cuda_graph": True}
        assert (sizes[0], sizes[-1]) == (1, batch + 64)
        # Few, and still nothing is padded by more than seven tokens or a quarter.
        assert len(sizes) < 20
        assert all(after - size <= max(8, size // 4 + 1) for size, after in itertools.pairwise(sizes))
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
    write_repository(checked(load_spec(path, checkpoints), tmp_path, weights=False), tmp_path)
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


def test_a_router_folder_is_linked_and_a_file_is_replaced(checkpoints: Path, tmp_path: Path) -> None:
    spec = checked(
        load_spec(CONFIGS / "query_level" / "Qwen3-0.6B_Qwen3-32B.yaml", checkpoints), tmp_path, weights=False
    )
    for _ in range(2):
        write_repository(spec, tmp_path)
        assert (tmp_path / "tokenrouter" / "1" / "routers" / "query_level").readlink() == checkpoints / LINKED
    path = deployment(tmp_path)
    for weights in (b"old", b"new"):
        (tmp_path / "checkpoints" / "router.pt").write_bytes(weights)
        write_repository(checked(load_spec(path), tmp_path, weights=False), tmp_path)
        assert (tmp_path / "tokenrouter" / "1" / "routers" / "r2r.pt").read_bytes() == weights


def test_the_committed_repository_is_what_the_demo_configuration_gives() -> None:
    files = repository_files(load_spec(ROOT / "configs" / "demo.yaml"))
    for relative, text in files.items():
        assert (ROOT / "model_repository" / relative).read_text("utf-8") == text, f"{relative}: build it again"
    committed = {
        str(path.relative_to(ROOT / "model_repository"))
        for path in (ROOT / "model_repository").rglob("*")
        if path.name in (BUILT, "config.pbtxt", "model.yaml", ".gitkeep")
    }
    assert committed == set(files)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_committed_deployment_builds(path: Path, tmp_path: Path) -> None:
    spec = load_spec(path)
    write_repository(spec, tmp_path)
    repository = Repository(tmp_path)
    assert tuple(repository.models(repository.entry())) == tuple(spec.models)
