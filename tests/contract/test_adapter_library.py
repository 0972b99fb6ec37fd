"""The TensorRT-LLM adapter and its library: settings, start-up, what a visit asks of it, and what it survives."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorrt_llm
from tensorrt_llm import _behaviour
from tensorrt_llm._double.model import POOL, PagedModel
from tensorrt_llm._double.scheduler import Scheduler

from tests.contract.deployments import DEMO, HANDOFF_IDS, ROOT, TENSORRT_LLM, deployment
from tests.contract.double import double_environment
from tokenrouter.engines import load_tensorrt_llm
from tokenrouter.engines.base import EngineStep, Placement
from tokenrouter.engines.tensorrt_llm import engine as engine_module
from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
from tokenrouter.engines.tensorrt_llm.environment import clean_environment
from tokenrouter.engines.tensorrt_llm.iterations import MOST_PENDING, Iterations, records
from tokenrouter.engines.tensorrt_llm.library import refuse_unsafe
from tokenrouter.engines.tensorrt_llm.outputs import Visit
from tokenrouter.engines.tensorrt_llm.visits import ControlIds, WorkerVisit
from tokenrouter.errors import ConfigError, EngineFailed, PolicyFailed, RouterError
from tokenrouter.messages import Outcome, PolicySpec, Sampling
from tokenrouter.offline import TokenRouter
from tokenrouter.policies.base import Policy, PolicyContext, PolicyParams
from tokenrouter.subserver.sequence import ModelSequence
from tools.demo_models.task import load_problems

PROMPTS = [problem.prompt for problem in load_problems(ROOT / "configs/demo/problems.jsonl")[:4]]
EOS = 256
ONE_TOKEN = json.dumps({"writers": [0, 1], "trigger": "first", "visit_tokens": 1})
"""The large model's visits end by their limit."""
ALTERNATE = json.dumps({"writers": [0, 1], "trigger": "keep"})


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenRouter]:
    folder = deployment(tmp_path_factory.mktemp("adapter"), selectable_policies="single,scripted")
    with TokenRouter.from_repository(folder) as opened:
        yield opened


def generate(router: TokenRouter, **fields: Any) -> list[Any]:
    return router.generate(PROMPTS, **{"max_tokens": 40, "policy": "single", **fields})


def engine_of(router: TokenRouter, model: str = "small") -> Any:
    return router._driver.subservers[model].engine


def assert_idle(router: TokenRouter) -> None:
    assert engine_of(router).blocks_leased == engine_of(router).blocks_used == 0


def wait_until(condition: Any, what: str) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


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


# --- times of steps --------------------------------------------------------------------------------------------------


def record(
    iteration: int, ms: float, *, active: int, new: int, contexts: int = 0, decodes: int = 0, tokens: int = 0
) -> dict[str, Any]:
    """Statistics of an iteration, as the library gives them."""
    batching = {"numContextRequests": contexts, "numGenRequests": decodes, "numCtxTokens": tokens}
    counts = {"numActiveRequests": active, "numNewActiveRequests": new}
    return {"iter": iteration, "iterLatencyMS": ms, **counts, "inflightBatchingStats": batching}


def output(iteration: int | None, ms: float) -> Any:
    """The final output of a request whose first token came in that iteration, so long after it was scheduled."""
    start = timedelta(seconds=100)
    times = SimpleNamespace(first_scheduled_time=start, first_token_time=start + timedelta(milliseconds=ms))
    return SimpleNamespace(request_perf_metrics=SimpleNamespace(first_iter=iteration, timing_metrics=times))


def test_an_iteration_is_a_step_if_nobody_had_to_be_waited_for() -> None:
    iterations = Iterations()
    assert iterations.told(record(7, 4.0, active=3, new=1, contexts=1, decodes=2, tokens=6)) == EngineStep(3, 5, 0.004)
    # All new: the loop may have waited.
    assert iterations.told(record(8, 900.0, active=2, new=2, contexts=2, tokens=2)) is None
    # No step: numbers of an earlier one.
    assert iterations.told(record(9, 900.0, active=1, new=0, decodes=2)) is None
    assert iterations.told(record(10, 900.0, active=0, new=0, decodes=2)) is None


@pytest.mark.parametrize("request_first", [True, False])
def test_where_all_are_new_a_request_tells_the_time_of_its_first_step(request_first: bool) -> None:
    iterations = Iterations()
    told = record(8, 900.0, active=2, new=2, contexts=2, tokens=5)
    steps = [iterations.timed(output(8, 3.0))] if request_first else []
    steps += [iterations.told(told)]
    steps += [iterations.timed(output(8, 3.0)), iterations.timed(output(8, 3.0))]
    assert [step for step in steps if step is not None] == [EngineStep(2, 3, 0.003)]
    # A prompt of several chunks was scheduled for the first time in an earlier iteration.
    iterations.told(record(9, 5.0, active=1, new=1, contexts=1, tokens=9))
    assert iterations.timed(output(9, 80.0)) is None
    assert iterations.timed(output(None, 1.0)) is iterations.timed(SimpleNamespace(request_perf_metrics=None)) is None


def test_what_never_finds_its_other_half_is_forgotten() -> None:
    iterations = Iterations()
    for number in range(3 * MOST_PENDING):
        iterations.told(record(2 * number, 5.0, active=1, new=1, contexts=1, tokens=1))
        iterations.timed(output(2 * number + 1, 1.0))
    assert len(iterations._untimed) == len(iterations._times) == MOST_PENDING


def test_an_executor_that_is_asked_by_rpc_is_asked_in_a_thread() -> None:
    threads: list[str] = []

    def get_stats(timeout: float) -> list[dict[str, Any]]:
        threads.append(threading.current_thread().name)
        return [{"iter": 1}, {"iter": 2}]

    llm = SimpleNamespace(_executor=SimpleNamespace(rpc_client=object()), get_stats=get_stats)

    async def asked() -> list[dict[str, Any]]:
        return [each async for each in records(llm)]

    assert asyncio.run(asked()) == [{"iter": 1}, {"iter": 2}]
    assert threads != [threading.current_thread().name]


def test_the_profiler_gets_step_times_by_batch_size(router: TokenRouter) -> None:
    statistics = router._driver.subservers["small"].statistics
    wanted = {1, len(PROMPTS)}

    def timed() -> bool:
        for prompts in (PROMPTS, PROMPTS[:1]):
            router.generate(prompts, max_tokens=12, policy="single", end_id=-1)
            time.sleep(0.6)
        return wanted <= statistics.step_times.by_batch.keys()

    wait_until(timed, "no step times")
    assert all(0 < sums.seconds / sums.steps < 5 for sums in statistics.step_times.by_batch.values())


def test_steps_of_a_model_that_writes_one_token_a_visit_are_timed(router: TokenRouter) -> None:
    """All its requests are new in every iteration, so their own times are needed."""
    sums = router._driver.subservers["large"].statistics.step_times.by_batch[1]
    before, rounds = sums.steps, 3
    for _ in range(rounds):
        router.generate(PROMPTS[:1], max_tokens=12, policy="scripted", policy_params=ONE_TOKEN, end_id=-1)
        time.sleep(0.6)
    # Those of the last round may still be on their way.
    assert sums.steps - before >= (rounds - 1) * 6
    assert 0 < sums.seconds < 60


def test_without_statistics_nobody_asks(tmp_path: Path) -> None:
    folder = deployment(tmp_path, per_model={"small": {"enable_iter_perf_stats": False}})
    with TokenRouter.from_repository(folder) as router:
        router.generate(PROMPTS[:1], max_tokens=3, policy="single")
        assert engine_of(router)._asking is None
        assert engine_of(router, "large")._asking is not None


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
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


# --- what a visit asks -----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Any]]:
    """Arguments and outputs of the library's calls."""
    whole, calls = tensorrt_llm.LLM.generate_async, []

    def noted(self: Any, inputs: Any, **kwargs: Any) -> Any:
        output = whole(self, inputs, **kwargs)
        calls.append(({"inputs": inputs, **kwargs}, output))
        return output

    monkeypatch.setattr(tensorrt_llm.LLM, "generate_async", noted)
    return calls


def test_what_a_visit_asks_of_the_library(
    router: TokenRouter, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole history each time, one salt for all, blocks worth keeping, and no work for its own sampler."""
    monkeypatch.setattr(engine_of(router)._library, "_offered", {"cache_salt", "kv_cache_retention_config"})
    (result,) = router.generate(
        PROMPTS[:1], max_tokens=6, policy="scripted", policy_params=ALTERNATE, temperature=0.5, seed=1
    )
    prompt = router._driver.entry.tokenizer.encode(PROMPTS[0]).ids
    assert [call["inputs"]["prompt_token_ids"] for call, _ in asked] == [
        [*prompt, *result.tokens[:count]] for count in range(6)
    ]
    assert len({call["cache_salt"] for call, _ in asked}) == 1
    for i, (call, _) in enumerate(asked):
        retention, params = call["kv_cache_retention_config"], call["sampling_params"]
        assert retention.decode_retention_priority == 100
        assert [(r.token_start, r.token_end, r.priority) for r in retention.token_range_retention_configs] == [
            (0, None, 100)
        ]
        # The engine ends it at the other model's id, and looks for no others.
        assert (params.top_k, params.detokenize, params.stop_token_ids) == (1, False, None)
        assert (params.end_id, params.ignore_eos) == (HANDOFF_IDS[1 - i % 2], False)
        assert call["streaming"] is True


def test_an_end_of_the_response_is_followed_by_the_id_that_ends_the_request(
    router: TokenRouter, asked: list[Any]
) -> None:
    """Once per response, unseen by anybody, and not at all where the limit comes with it."""
    numbers = router.statistics["small"].cache
    before = numbers.surplus_tokens
    (result,) = router.generate(PROMPTS[:1], max_tokens=200, policy="single")
    length = len(result.tokens)
    assert (result.finish_reason, result.tokens[-1]) == ("stop", EOS)
    (capped,) = router.generate(PROMPTS[:1], max_tokens=length, policy="single")
    assert (capped.tokens, capped.finish_reason) == (result.tokens, "stop")
    (_, free), (_, exact) = asked
    wait_until(lambda: free.finished and exact.finished, "the engine goes on")
    assert (free.outputs[0].token_ids, free.outputs[0].finish_reason) == ([*result.tokens, HANDOFF_IDS[0]], "stop")
    assert (exact.outputs[0].token_ids, exact.outputs[0].finish_reason) == (result.tokens, "length")
    assert numbers.surplus_tokens == before
    assert_idle(router)


def test_without_an_unused_id_the_engine_ends_at_the_responses_own(tmp_path: Path, asked: list[Any]) -> None:
    folder = deployment(tmp_path, models=["small"], per_model={"small": {"handoff_ids": []}}, end_ids=f"{EOS},18")
    with TokenRouter.from_repository(folder) as router:
        generate(router)
        generate(router, end_id=-1)
    params = [call["sampling_params"] for call, _ in asked[1:]]
    ends = [(each.end_id, each.stop_token_ids, each.ignore_eos) for each in params]
    assert ends == [(EOS, [18], False)] * 4 + [(0, None, True)] * 4


@pytest.mark.parametrize(
    ("models", "decides", "written", "reason", "stopped_at", "told"),
    [
        (2, True, [1, 2], None, None, (Outcome.STAY, (1, 2), "")),
        (2, True, [1, 91], "stop", None, (Outcome.LEAVE, (1,), "b")),
        (2, True, [1, 2], "length", None, (Outcome.LENGTH, (1, 2), "")),
        (2, True, [1, EOS], None, None, (Outcome.STOP, (1, EOS), "")),
        (2, True, [1, EOS], "length", None, (Outcome.STOP, (1, EOS), "")),
        (2, True, [1, 90], None, None, (Outcome.FAILED, (), "policy_failed")),
        (2, True, [1], "cancelled", None, (Outcome.FAILED, (), "engine_failed")),
        (3, True, [1, 92], None, None, (Outcome.LEAVE, (1,), "c")),
        (3, True, [92, 91], "stop", None, (Outcome.LEAVE, (), "c")),
        (2, False, [1, EOS, 90], "stop", None, (Outcome.STOP, (1, EOS), "")),
        (2, False, [1, 90], "stop", None, (Outcome.FAILED, (), "engine_failed")),
        (0, False, [1, EOS], "stop", None, (Outcome.STOP, (1, EOS), "")),
        (0, False, [1], "stop", 18, (Outcome.STOP, (1, 18), "")),
    ],
)
def test_what_the_ids_of_an_output_mean(
    models: int, decides: bool, written: list[int], reason: str, stopped_at: int | None, told: tuple[Any, ...]
) -> None:
    names = ("a", "b", "c")[: models or 2]
    policy = (_Decides if decides else Policy)(PolicyParams(), PolicyContext(names))
    ids = ControlIds.of(policy, "a", range(90, 90 + models))
    task = SimpleNamespace(
        ids=ids, models=names, model="a", policy=PolicySpec("p"), sampling=Sampling(9, end_ids=(EOS, 18))
    )
    completion = SimpleNamespace(token_ids=written, finish_reason=reason, stop_reason=stopped_at)
    visit = Visit(1, None, task, [], 9, SimpleNamespace(outputs=[completion]))  # type: ignore[arg-type]
    news = visit.news()
    assert news is not None
    says = news.error.slug if isinstance(news.error, RouterError) else news.target
    assert (news.outcome, news.tokens, says) == told
    assert visit.news() is None


class _Decides(Policy):
    name = "decides"

    def route(self, batch: Any) -> Any: ...


def test_keywords_that_a_version_lacks_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tensorrt_llm.LLM.generate_async

    def older(self: Any, inputs: Any, sampling_params: Any = None, streaming: bool = False) -> Any:
        return whole(self, inputs, sampling_params=sampling_params, streaming=streaming)

    monkeypatch.setattr(tensorrt_llm.LLM, "generate_async", older)
    folder = deployment(tmp_path, models=["small"])
    with caplog.at_level(logging.WARNING), TokenRouter.from_repository(folder) as router:
        assert generate(router)
    assert "generate_async has no cache_salt" in caplog.text
    assert "generate_async has no kv_cache_retention_config" in caplog.text


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_prompt_that_the_engine_refuses_fails_its_request_with_the_reason(
    router: TokenRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("The prompt is not to my liking")

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm.LLM, "generate_async", refuses)
        with pytest.raises(EngineFailed, match="ValueError: The prompt is not to my liking"):
            generate(router)
    assert_idle(router)


def test_an_executor_that_fails_a_step_fails_its_requests(router: TokenRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, rows: Any) -> Any:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(PagedModel, "run", fails)
        with pytest.raises(EngineFailed, match="device lost"):
            generate(router)
    assert_idle(router)
    assert generate(router)


@pytest.mark.parametrize(
    ("handoff_ids", "policy", "error"),
    [(HANDOFF_IDS, "single", EngineFailed), (HANDOFF_IDS, "scripted", PolicyFailed), ([], "single", None)],
)
def test_a_visit_that_fails_in_the_worker_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handoff_ids: list[int], policy: str, error: type[Exception] | None
) -> None:
    """Without an unused id to say so, its response ends there."""
    choose = WorkerVisit.choose

    def fails(self: Any, row: Any, history: Any) -> Any:
        if len(history) == 10:
            raise RuntimeError("out of memory")
        return choose(self, row, history)

    per_model = {"small": {"handoff_ids": handoff_ids}}
    folder = deployment(tmp_path, per_model=per_model, selectable_policies="single,scripted")
    with TokenRouter.from_repository(folder) as router:
        params = json.dumps({"writers": [0]} if policy == "scripted" else {})
        fields = {"max_tokens": 60, "end_id": EOS, "policy": policy, "policy_params": params}
        want = router.generate([[20] * 30], **fields)
        monkeypatch.setattr(WorkerVisit, "choose", fails)
        prompts = [[20] * 30, [20] * 8]
        if error is None:
            got = router.generate(prompts, **fields)
            assert (len(got[1].tokens), got[1].finish_reason) == (3, "stop")
        else:
            updates = router.stream(prompts[0], **fields)
            next(updates)
            with pytest.raises(error, match="failed in"):
                router.generate(prompts[1:], **fields)
            got = [[update.result for update in updates][-1]]
        assert [got[0].tokens] == [result.tokens for result in want]
        assert_idle(router)


def visit_of(engine: Any, ticket: int) -> None:
    """Submits a visit as a subserver does."""
    spec, policy = PolicySpec("single"), Policy(PolicyParams(), PolicyContext(("small", "large")))
    sequence = ModelSequence(
        model="small", tokens=[20, 21], prompt_tokens=2, sampling=Sampling(9), policy=policy, spec=spec
    )
    sequence.handle = engine.open(kv_tokens=11, prompt_tokens=2)
    sequence.arrive(visit=1, source="", state={})
    sequence.then = "small"
    engine.submit([(ticket, sequence)])


def test_who_follows_an_abort_without_an_answer_gives_up(router: TokenRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double drops what is aborted before it is active."""
    monkeypatch.setattr(engine_module, "ABORT_GRACE_S", 0.2)
    engine = engine_of(router)
    assert not engine._tasks
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "activate", lambda self: [])
        visit_of(engine, 10**6)
        wait_until(lambda: engine._tasks, "the visit starts")
        engine.cancel(10**6)
        wait_until(lambda: not engine._tasks, "whoever follows the visit waits for ever")
    assert not engine._visits


def test_a_worker_that_dies_fails_visits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    folder = deployment(tmp_path, "single", {"model": "small"}, models=["small"])
    router = TokenRouter.from_repository(folder)
    try:
        (pid,) = engine_of(router)._workers._files
        updates = router.stream(PROMPTS[0], max_tokens=900, end_id=-1)
        next(updates)
        os.kill(pid, 9)
        for says in ("of TensorRT-LLM ended; load the model again", f"worker process {pid}"):
            with pytest.raises(EngineFailed, match=says):
                list(updates)
            updates = router.stream(PROMPTS[0], max_tokens=9)
        assert_idle(router)
    finally:
        router.close()
