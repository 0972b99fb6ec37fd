"""The TensorRT-LLM adapter: what becomes of its visits, and which policies it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm import _behaviour

from tests.contract.deployments import BLOCK, PROMPTS, TENSORRT_LLM, TORCH, deployment
from tokenrouter.errors import ConfigError, InvalidRequest, PolicyFailed
from tokenrouter.offline import TokenRouter
from tokenrouter.response import Result

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


def test_a_policy_that_remembers_earlier_positions_is_refused(router: TokenRouter, tmp_path: Path) -> None:
    remembers = "remembers a request's earlier positions, and 'small' runs on TensorRT-LLM.*engine: torch"
    with pytest.raises(InvalidRequest, match=remembers):
        generate(router, "r2r", {"strategy": "momentum"})
    assert_idle(router)
    with pytest.raises(ConfigError, match=remembers):
        TokenRouter.from_repository(deployment(tmp_path, "r2r", {"strategy": "rolling"}))


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
