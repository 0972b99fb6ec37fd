"""The TensorRT-LLM adapter: what it refuses, what it survives, and what becomes of its visits."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorrt_llm
from tensorrt_llm import _behaviour

from tests.contract.deployments import BLOCK, DEMO, ROOT, TENSORRT_LLM, TORCH, deployment
from tokenrouter.engines import load_tensorrt_llm
from tokenrouter.engines.base import Placement
from tokenrouter.engines.tensorrt_llm.environment import clean_environment
from tokenrouter.errors import ConfigError, EngineFailed, InvalidRequest, PolicyFailed
from tokenrouter.offline import TokenRouter
from tokenrouter.response import Result
from tools.demo_models.task import load_problems

PROMPTS = [problem.prompt for problem in load_problems(ROOT / "configs/demo/problems.jsonl")[:4]]
POLICIES = "tests.contract.policies"
OWN = ",".join(f"{POLICIES}:{name}" for name in ("Counts", "CountsAloud", "Raises", "Reads"))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenRouter]:
    folder = deployment(tmp_path_factory.mktemp("adapter"), selectable_policies=f"single,rstitch,scripted,r2r,{OWN}")
    with TokenRouter.from_repository(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def torch_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenRouter]:
    folder = deployment(
        tmp_path_factory.mktemp("torch"), engine=TORCH, selectable_policies=f"single,rstitch,scripted,{OWN}"
    )
    with TokenRouter.from_repository(folder) as opened:
        yield opened


def generate(router: TokenRouter, policy: str, params: dict[str, Any] | None = None, **fields: Any) -> list[Result]:
    given = {"max_tokens": 40, "seed": 3, "policy": policy, "policy_params": json.dumps(params or {}), **fields}
    return router.generate(PROMPTS, **given)


def writers(result: Result) -> list[str]:
    return [run.model for run in result.runs for _ in range(run.start, run.end)]


def assert_idle(router: TokenRouter) -> None:
    for name, subserver in router._driver.subservers.items():
        assert subserver.engine.blocks_leased == subserver.engine.blocks_used == 0, name
        assert subserver.open_sequences == subserver.residents == 0, name


# --- hand-offs at the edges ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("trigger", ["discard", "keep"])
def test_a_handoff_at_the_last_allowed_token(
    router: TokenRouter, torch_router: TokenRouter, trigger: str, most: int
) -> None:
    """The engine says `length` then, and leaves the reserved id in the output."""
    params = {"writers": [0, 0, 1, 1], "trigger": trigger}
    got = generate(router, "scripted", params, max_tokens=most)
    want = generate(torch_router, "scripted", params, max_tokens=most)
    assert [(r.tokens, writers(r), r.finish_reason) for r in got] == [
        (r.tokens, writers(r), r.finish_reason) for r in want
    ]
    assert all(len(result.tokens) == most for result in got)
    assert_idle(router)


def test_reserved_ids_never_appear(router: TokenRouter) -> None:
    """Not even where everything else is banned or the distribution is flat."""
    results = generate(router, "scripted", {"writers": [0, 1, 1]}, temperature=100.0, max_tokens=64)
    reserved = set(TENSORRT_LLM["handoff_ids"][:2])
    assert not any(reserved & set(result.tokens) for result in results)
    assert_idle(router)


def test_a_stop_word_ends_a_visit_that_runs(router: TokenRouter, torch_router: TokenRouter) -> None:
    got = generate(router, "single", stop_words=("=",))
    want = generate(torch_router, "single", stop_words=("=",))
    assert [(r.text, r.tokens, r.finish_reason) for r in got] == [(r.text, r.tokens, r.finish_reason) for r in want]
    assert {result.finish_reason for result in got} == {"stop"}
    assert_idle(router)


# --- cancel ----------------------------------------------------------------------------------------------------------


def test_a_response_that_is_given_up_frees_everything(router: TokenRouter) -> None:
    subservers = router._driver.subservers.values()
    surplus = sum(subserver.statistics.cache.surplus_tokens for subserver in subservers)
    for policy, params in (("single", {}), ("scripted", {"writers": [0, 1, 1]})):
        updates = router.stream(PROMPTS[0], policy=policy, policy_params=json.dumps(params), max_tokens=900, end_id=-1)
        for _ in range(5):
            next(updates)
        updates.close()
        assert_idle(router)
    end = time.monotonic() + 10.0
    while any(subserver.engine._tasks for subserver in subservers):
        assert time.monotonic() < end, "an aborted visit runs on"
        time.sleep(0.01)
    assert len(generate(router, "single")) == len(PROMPTS)
    # It ends a few steps later, and not after all it was asked for.
    assert sum(subserver.statistics.cache.surplus_tokens for subserver in subservers) - surplus < 300


def test_news_of_an_aborted_visit_are_dropped(router: TokenRouter) -> None:
    before = {name: subserver.statistics.failures for name, subserver in router._driver.subservers.items()}
    updates = router.stream(PROMPTS[0], policy="single", max_tokens=900, end_id=-1)
    next(updates)
    updates.close()
    time.sleep(0.2)
    generate(router, "single")
    assert {name: subserver.statistics.failures for name, subserver in router._driver.subservers.items()} == before


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", ["generated_stored", "reuse"])
def test_a_cache_that_forgets_costs_time_and_no_token(tmp_path: Path, torch_router: TokenRouter, forgets: str) -> None:
    params = {"writers": [0] * BLOCK + [1] * BLOCK, "trigger": "keep"}
    want = generate(torch_router, "scripted", params, max_tokens=96, end_id=-1)
    with TokenRouter.from_repository(deployment(tmp_path)) as router, _behaviour.broken(forgets):
        got = generate(router, "scripted", params, max_tokens=96, end_id=-1)
        numbers = router._driver.subservers["small"].statistics
    assert [result.tokens for result in got] == [result.tokens for result in want]
    assert numbers.cache.recomputed_tokens > 0
    if forgets == "reuse":
        # Two visits of each response come back to small, and everything that was left there is gone.
        assert numbers.cache.lost_prefixes == 2 * len(PROMPTS)
        assert numbers.cache.recomputed_tokens >= 2 * len(PROMPTS) * BLOCK


def test_what_a_visit_leaves_is_found_again(tmp_path: Path) -> None:
    with TokenRouter.from_repository(deployment(tmp_path)) as router:
        params = {"writers": [0] * 5 + [1] * 7, "trigger": "keep"}
        results = generate(router, "scripted", params, max_tokens=48, end_id=-1)
        numbers = {name: subserver.statistics for name, subserver in router._driver.subservers.items()}
    prompts = sum(len(router._driver.entry.tokenizer.encode(prompt).ids) for prompt in PROMPTS)
    total = prompts + sum(len(result.tokens) for result in results)
    for name in ("small", "large"):
        assert numbers[name].cache.recomputed_tokens == numbers[name].cache.lost_prefixes == 0
        # Every token is run once at each model, but for the last ones; a hand-off of a kept token runs nothing twice.
        assert numbers[name].new_tokens <= total


# --- policies --------------------------------------------------------------------------------------------------------


def test_a_policy_that_fails_in_the_worker_fails_its_requests_only(
    router: TokenRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PolicyFailed, match="failed in the engine's worker"):
        generate(router, f"{POLICIES}:Raises")
    assert "boom" in caplog.text
    assert_idle(router)
    assert all(result.finish_reason for result in generate(router, "rstitch"))


def test_a_state_that_would_be_lost_is_refused(router: TokenRouter, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PolicyFailed, match="failed in the engine's worker"):
        generate(router, f"{POLICIES}:Counts")
    assert "rebuilds_state" in caplog.text
    assert_idle(router)


def test_a_policy_may_say_that_it_rebuilds_its_state(router: TokenRouter, torch_router: TokenRouter) -> None:
    name = f"{POLICIES}:CountsAloud"
    got, want = generate(router, name), generate(torch_router, name)
    assert [(r.tokens, writers(r)) for r in got] == [(r.tokens, writers(r)) for r in want]


def test_hidden_states_are_for_the_deployments_own_policy(router: TokenRouter) -> None:
    with pytest.raises(InvalidRequest, match="stay inside model 'small'"):
        generate(router, "r2r")
    assert_idle(router)


def test_a_router_inside_the_model_has_one_set_of_parameters(tmp_path: Path) -> None:
    with TokenRouter.from_repository(deployment(tmp_path, "r2r", {"threshold": 0.4})) as router:
        own = generate(router, "r2r", {"threshold": 0.4})
        assert [result.finish_reason for result in own]
        with pytest.raises(InvalidRequest, match=r"leave policy and policy_params out"):
            generate(router, "r2r", {"threshold": 0.3})
        for change in ({"temperature": 0.7}, {"repetition_penalty": 1.2}, {"bad_words": ("1",)}, {"min_tokens": 3}):
            with pytest.raises(InvalidRequest, match=r"router_token: argmax"):
                router.generate(PROMPTS[:1], max_tokens=8, **change)
        assert_idle(router)


def test_the_likeliest_token_may_stand_for_the_sampled_one(tmp_path: Path) -> None:
    per_model = {"small": {"router_token": "argmax"}}
    with TokenRouter.from_repository(deployment(tmp_path, "r2r", per_model=per_model)) as router:
        results = router.generate(PROMPTS, max_tokens=48, temperature=0.7, seed=2)
    assert sum(result.handoffs for result in results) > 0


def test_log_probabilities_are_refused(router: TokenRouter) -> None:
    with pytest.raises(InvalidRequest, match="return_log_probs"):
        router.generate(PROMPTS[:1], max_tokens=4, policy="single", return_log_probs=True)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beam_widht": 2}, "beam_widht is no argument of TensorRT-LLM"),
        ({"kv_cache_config": {"max_tokens": 4096, "tokens_per_blok": 16}}, r"kv_cache_config\.tokens_per_blok"),
        ({"disable_overlap_scheduler": False}, "history that lags"),
        ({"speculative_config": {"decoding_type": "NGram"}}, "speculative decoding"),
        ({"max_beam_width": 4}, "one sequence"),
        ({"batch_wait_timeout_ms": 5}, "stall every step"),
        ({"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}, "skips the router"),
        ({"kv_cache_config": {"max_tokens": 4096, "enable_block_reuse": False}}, "whole history again"),
        ({"kv_cache_config": {}}, r"kv_cache_config\.max_tokens is missing"),
        ({"max_num_tokens": 64, "enable_chunked_prefill": False}, "need enable_chunked_prefill"),
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


@pytest.mark.parametrize(
    ("policy", "params", "says"),
    [
        ("collm", {"warmup": "linear"}, "looks at single requests"),
        (f"{POLICIES}:Reads", {}, "looks at single requests"),
        ("r2r", {"checkpoint": "tokenrouter/1/routers/nothing.safetensors"}, "nothing.safetensors"),
    ],
)
def test_policies_that_cannot_run_inside_a_model_are_refused_at_load(
    tmp_path: Path, policy: str, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"cannot run in the graph of 'small'.*{says}"):
        TokenRouter.from_repository(deployment(tmp_path, policy, params))


def test_too_few_reserved_ids_are_told_with_the_remedy(tmp_path: Path) -> None:
    per_model = {"small": {"handoff_ids": [258]}, "large": {"handoff_ids": []}}
    with TokenRouter.from_repository(deployment(tmp_path, per_model=per_model)) as router:
        with pytest.raises(ConfigError, match=r"name some as handoff_ids in model\.yaml"):
            generate(router, "rstitch")
        generate(router, "single", {"model": "large"})
        assert_idle(router)


def test_the_large_model_of_one_token_policies_needs_no_reserved_ids(tmp_path: Path) -> None:
    with TokenRouter.from_repository(deployment(tmp_path, per_model={"large": {"handoff_ids": []}})) as router:
        results = generate(router, "random", {"p": 0.3})
        assert sum(result.handoffs for result in results) > 0


def test_unused_ids_are_found_by_themselves(tmp_path: Path) -> None:
    from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig

    folder = tmp_path / "wide"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(DEMO / "small" / "1" / "tokenizer.json")
    described = json.loads((DEMO / "small" / "1" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "vocab_size": 272}))
    config = TensorRtLlmConfig.from_mapping(folder, {"kv_cache_config": {"max_tokens": 4096}})
    assert config.own.handoff_ids == tuple(range(262, 272))
    assert (config.info.max_context, config.info.block_tokens, config.info.kv_blocks) == (1024, 32, 128)
    assert config.arguments["disable_overlap_scheduler"] is True


# --- the library -----------------------------------------------------------------------------------------------------


def test_what_a_visit_asks_of_the_library(router: TokenRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole history each time, one salt for all, blocks worth keeping, and no work for its own sampler."""
    whole, calls = tensorrt_llm.LLM.generate_async, []

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return whole(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm.LLM, "generate_async", noted)
        patch.setattr(
            router._driver.subservers["small"].engine._library, "_offered", {"cache_salt", "kv_cache_retention_config"}
        )
        (result,) = router.generate(
            PROMPTS[:1],
            max_tokens=6,
            policy="scripted",
            policy_params='{"writers": [0, 1], "trigger": "keep"}',
            temperature=0.5,
            seed=1,
        )
    prompt = router._driver.entry.tokenizer.encode(PROMPTS[0]).ids
    histories = [args[0]["prompt_token_ids"] for args, _ in calls]
    assert histories == [[*prompt, *result.tokens[:count]] for count in range(6)]
    assert len({kwargs["cache_salt"] for _, kwargs in calls}) == 1
    for _, kwargs in calls:
        retention, params = kwargs["kv_cache_retention_config"], kwargs["sampling_params"]
        assert retention.decode_retention_priority == 100
        assert [(r.token_start, r.token_end, r.priority) for r in retention.token_range_retention_configs] == [
            (0, None, 100)
        ]
        assert (params.top_k, params.detokenize, params.end_id) == (1, False, 256)
        assert kwargs["streaming"] is True


def test_keywords_that_a_version_lacks_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tensorrt_llm.LLM.generate_async

    def older(self: Any, inputs: Any, sampling_params: Any = None, streaming: bool = False) -> Any:
        return whole(self, inputs, sampling_params=sampling_params, streaming=streaming)

    monkeypatch.setattr(tensorrt_llm.LLM, "generate_async", older)
    with caplog.at_level(logging.WARNING), TokenRouter.from_repository(deployment(tmp_path)) as router:
        assert generate(router, "rstitch")
    assert "generate_async has no cache_salt" in caplog.text
    assert "generate_async has no kv_cache_retention_config" in caplog.text


def test_a_prompt_that_the_engine_refuses_fails_its_request_with_the_reason(
    router: TokenRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("The prompt is not to my liking")

    with monkeypatch.context() as patch:
        # What a library says is told as it is.
        patch.setattr(type(router._driver.subservers["small"].engine._library._llm), "generate_async", refuses)
        with pytest.raises(EngineFailed, match="ValueError: The prompt is not to my liking"):
            generate(router, "single")
    assert_idle(router)


def test_an_executor_that_fails_a_step_fails_its_requests(router: TokenRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenrouter.engines.tensorrt_llm.visits import WorkerVisit

    def fails(self: Any, row: Any, history: Any) -> Any:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(WorkerVisit, "choose", fails)
        with pytest.raises(EngineFailed, match="device lost"):
            generate(router, "single")
    assert_idle(router)
    assert generate(router, "single")


def test_a_launchers_job_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    import os

    clean_environment(())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    clean_environment((2, 3))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PMI_"))]


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
