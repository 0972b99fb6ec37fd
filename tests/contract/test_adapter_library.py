"""The TensorRT-LLM adapter and its library: settings and start-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorrt_llm
from tensorrt_llm import _behaviour
from tensorrt_llm._double.model import POOL
from tensorrt_llm._double.scheduler import Scheduler

from tests.contract.deployments import DEMO, TENSORRT_LLM, assert_idle, deployment, engine_of
from tests.contract.double import double_environment
from tokenrouter.engines import load_tensorrt_llm
from tokenrouter.engines.base import Placement
from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
from tokenrouter.engines.tensorrt_llm.environment import clean_environment
from tokenrouter.engines.tensorrt_llm.library import refuse_unsafe
from tokenrouter.errors import ConfigError
from tokenrouter.offline import TokenRouter

ALTERNATE = json.dumps({"writers": [0, 1], "trigger": "keep"})


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beam_widht": 2}, "beam_widht is no argument of TensorRT-LLM"),
        (
            {"gpu_device_ids": "0,1"},
            "gpu_device_ids is a setting of NVIDIA's llmapi models: name the model's GPUs as gpus",
        ),
        ({"triton_config": {}}, r"triton_config is a setting of NVIDIA's llmapi models: config\.pbtxt is written by"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, but has to be 1: no source confirms"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2, but has to be 1"),
        ({"enable_attention_dp": True}, "enable_attention_dp is True, but has to be False: a request that comes back"),
        ({"kv_cache_config": {"max_tokens": 4096, "tokens_per_blok": 16}}, r"kv_cache_config\.tokens_per_blok"),
        ({"disable_overlap_scheduler": False}, "history that lags"),
        ({"speculative_config": {"decoding_type": "NGram"}}, "speculative decoding"),
        ({"max_beam_width": 4}, "one sequence"),
        ({"batch_wait_timeout_ms": 5}, "stall every step"),
        ({"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}, "skips the router"),
        ({"kv_cache_config": {"max_tokens": 4096, "enable_block_reuse": False}}, "whole history again"),
        ({"kv_cache_config": {}}, r"kv_cache_config\.max_tokens is missing"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill is False.*does not fit into a step"),
        ({"handoff_ids": [3, 3]}, "handoff_ids"),
        ({"handoff_ids": [262]}, r"\[0, 262\)"),
        ({"handoff_ids": "258"}, "handoff_ids"),
        ({"gpus": [-1.5]}, "gpus"),
        ({"router_token": "best"}, "router_token"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], says: str) -> None:
    options = {key: value for key, value in {**TENSORRT_LLM, **changes}.items() if key != "engine"}
    with pytest.raises(ConfigError, match=f"model.yaml: .*{says}"):
        load_tensorrt_llm(DEMO / "small" / "1", options, Placement())


def test_what_the_settings_leave_out(tmp_path: Path) -> None:
    """Unused ids are found, sizes follow, and histories of any length can be resumed together."""
    folder = tmp_path / "wide"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(DEMO / "small" / "1" / "tokenizer.json")
    described = json.loads((DEMO / "small" / "1" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "vocab_size": 272}))
    # A key of a later release passes here; it is left out at load where it is not known.
    given = {"kv_cache_config": {"max_tokens": 4096, "use_kv_cache_manager_v2": False}}
    config = TensorRtLlmConfig.from_mapping(folder, given)
    assert config.own.handoff_ids == tuple(range(262, 272))
    assert (config.info.max_context, config.info.block_tokens, config.info.kv_blocks) == (1024, 32, 128)
    assert config.arguments["disable_overlap_scheduler"] is config.arguments["enable_chunked_prefill"] is True
    assert config.arguments["scheduler_config"]["context_chunking_policy"] == "EQUAL_PROGRESS"


def test_resumed_histories_share_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 tokens each, charged in full, two would fit."""
    steps: list[list[int]] = []
    schedule = Scheduler.schedule

    def noted(self: Scheduler) -> Any:
        rows = schedule(self)
        steps.append([row.chunk for row in rows if row.prefilling])
        return rows

    monkeypatch.setattr(Scheduler, "schedule", noted)
    prompts = [[16 + i] * 100 for i in range(8)]
    folder = deployment(tmp_path, per_model={"small": {"max_num_tokens": 256}})
    with TokenRouter.from_repository(folder) as router:
        router.generate(prompts, max_tokens=12, policy="scripted", policy_params=ALTERNATE, end_id=-1)
    together = [len(chunks) for chunks in steps if sum(chunks) < 40]
    assert max(together) > 2, together


# --- start-up --------------------------------------------------------------------------------------------------------

IMPORTS = """
import json, os, sys, threading
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorrt_llm" and not seen:
            seen.append([threading.current_thread() is threading.main_thread(), dict(os.environ)])
seen = []
sys.meta_path.insert(0, Finder())
from tokenrouter.offline import TokenRouter
TokenRouter.from_repository(sys.argv[1]).close()
print(json.dumps(seen[0]))
"""


def test_the_environment_is_clean_when_the_library_is_imported(tmp_path: Path) -> None:
    """Also where a class of ours has to be registered with it first. GPUs that it sees by then, workers see too."""
    folder = deployment(tmp_path, "r2r", per_model={"small": {"gpus": [2, 3]}})
    job = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "ORTE_X": "1", "CUDA_VISIBLE_DEVICES": "7"}
    environment = {**os.environ, **double_environment(), **job}
    command = [sys.executable, "-c", IMPORTS, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    main_thread, environment = json.loads(done.stdout)
    assert not main_thread
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["TRTLLM_VISIBLE_DEVICES"] == "2,3"
    assert not set(job) - {"CUDA_VISIBLE_DEVICES"} & set(environment)


def test_a_launchers_job_is_left_behind_and_its_configuration_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("OMPI_COMM_WORLD_RANK", "PMIX_SERVER_URI21", "PMIX_GDS_MODULE", "PMI_FD", "OMPI_MCA_orte_ess", "ORTE_X")
    stays = ("OMPI_MCA_btl", "PMIX_MCA_gds", "OMPI_ALLOW_RUN_AS_ROOT", "CUDA_VISIBLE_DEVICES")
    for name in (*gone, *stays):
        monkeypatch.setenv(name, "7")
    clean_environment(())
    assert [os.environ.get(name) for name in (*gone, *stays)] == [None] * len(gone) + ["7"] * len(stays)


def test_the_librarys_own_launcher_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    with pytest.raises(ConfigError, match=r"trtllm-llmapi-launch.*span nodes are not supported\. Start tritonserver"):
        clean_environment(())


def test_nothing_imports_the_library_before_a_model_loads() -> None:
    code = (
        "import pkgutil, importlib, sys, tokenrouter\n"
        "for module in pkgutil.walk_packages(tokenrouter.__path__, 'tokenrouter.'):\n"
        "    if '.triton' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
        "assert 'tensorrt_llm' not in sys.modules\n"
        "from pathlib import Path\n"
        "from tokenrouter.engines import load_tensorrt_llm\n"
        "from tokenrouter.engines.base import Placement\n"
        "try:\n"
        "    options = {'kv_cache_config': {'max_tokens': 4096}}\n"
        f"    load_tensorrt_llm(Path({str(DEMO / 'small' / '1')!r}), options, Placement())\n"
        "except Exception as exc:\n"
        "    print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError engine tensorrt_llm: the package cannot be imported")


@pytest.mark.parametrize("version", ["1.1.0", "1.2.0", "1.2.1rc2", "1.3.0rc10", "1.3.0rc11", "1.3.0rc5.post2"])
def test_releases_that_give_wrong_tokens_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm, "__version__", version)
    options = {key: value for key, value in TENSORRT_LLM.items() if key != "engine"}
    with pytest.raises(ConfigError, match=f"TensorRT-LLM {version} is installed.*wrong tokens.*install 1.2.1"):
        load_tensorrt_llm(DEMO / "small" / "1", options, Placement())


@pytest.mark.parametrize("version", ["1.2.1", "1.2.1+cu131", "1.2.2", "1.3.0rc12", "1.3.0", "1.4.0rc1", "local"])
def test_later_releases_are_not(version: str) -> None:
    refuse_unsafe(version)


@pytest.mark.parametrize(
    ("pool", "padded", "breaks", "blocks", "says"),
    [
        (None, False, (), 1024, ""),
        (None, True, (), 1023, ""),
        (100, True, (), 99, "allocated 100 KV blocks, not the 1024"),
        (100, False, ("manager_in_frames",), 1024, "cannot be counted"),
    ],
)
def test_the_ledger_has_the_blocks_that_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pool: int | None,
    padded: bool,
    breaks: tuple[str, ...],
    blocks: int,
    says: str,
) -> None:
    """And all of them can be used at once."""
    if pool is not None:
        monkeypatch.setenv(POOL, str(pool))
    graphs = {"cuda_graph_config": {"enable_padding": True}} if padded else {}
    folder = deployment(tmp_path, models=["small"], engine={**TENSORRT_LLM, **graphs})
    with _behaviour.broken(*breaks), TokenRouter.from_repository(folder) as router:
        engine = engine_of(router)
        assert engine.info.kv_blocks == blocks
        assert says in caplog.text
        if blocks == 99:
            block = engine.info.block_tokens
            results = router.generate([[20] * block] * 3, max_tokens=32 * block, end_id=-1)
            assert [len(result.tokens) for result in results] == [32 * block] * 3
            assert_idle(router)


def test_a_worker_that_cannot_run_our_processors_is_told_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, req_id: int, logits: Any, token_ids: Any, *more: Any) -> None:
        raise ImportError("No module named 'tokenrouter'")

    monkeypatch.setattr("tokenrouter.engines.tensorrt_llm.probe.PoolProbe.__call__", fails)
    with pytest.raises(ConfigError, match=r"cannot run a first request.*No module named 'tokenrouter'"):
        TokenRouter.from_repository(deployment(tmp_path, models=["small"]))
