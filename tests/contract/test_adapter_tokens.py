"""The TensorRT-LLM adapter gives, token by token, what the torch engine gives: every policy, on the demo's prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.deployments import ROOT, TORCH, deployment
from tokenrouter.offline import TokenRouter
from tokenrouter.response import Result
from tools.demo_models.task import load_problems

PROMPTS = [problem.prompt for problem in load_problems(ROOT / "configs/demo/problems.jsonl")[:6]]
GLIMP = {"separator": "=", "think_end": "####"}
TWO, THREE = ("small", "large"), ("small", "large", "larger")
# Computed inside the small model, so each needs a deployment of its own.
INSIDE: dict[str, dict[str, Any]] = {"r2r": {}, "citer": {}, "collm": {}}
INSIDE_ALWAYS: dict[str, dict[str, Any]] = {"r2r": {"threshold": 0.0}, "citer": {"threshold": 1.0}}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {"model": "large"}),
    "random": ("random", {"p": 0.3}),
    "random always": ("random", {"p": 1.0}),
    "rstitch": ("rstitch", {"threshold": 0.03}),
    "rstitch always": ("rstitch", {"threshold": 0.0}),
    "rstitch max_prob": ("rstitch", {"measure": "max_prob", "threshold": 0.9}),
    "scripted discard": ("scripted", {"writers": [0, 0, 1, 0, 1, 1, 1]}),
    "scripted keep": ("scripted", {"writers": [0, 0, 1, 0, 1, 1, 1], "trigger": "keep"}),
    "markov": (
        "markov",
        {
            "routing": {"small": {"small": 0.7, "large": 0.3}, "large": {"small": 0.4, "large": 0.6}},
            "commit": {"large": {"small": 1}},
        },
    ),
    "me": ("me", {"weights": [0.6, 0.4]}),
    "me, large only": ("me", {"weights": [0.0, 1.0]}),
    "glimprouter": ("glimprouter", {"threshold": 0.1, **GLIMP}),
    "glimprouter always": ("glimprouter", {"threshold": 0.0, **GLIMP}),
    "glimprouter, short steps": ("glimprouter", {"threshold": 0.05, "step_limit": 3, "think_limit": 20, **GLIMP}),
    "query_level": ("query_level", {"router": "classifier"}),
    "r2r by entropy": ("r2r", {"strategy": "entropy", "entropy_threshold": 0.1}),
    "collm by column": ("collm", {"deferral_id": 7, "threshold": 0.1}),
}
OF_THREE: dict[str, tuple[str, dict[str, Any]]] = {
    "me": ("me", {"weights": [0.5, 0.3, 0.2]}),
    "scripted discard": ("scripted", {"writers": [0, 2, 1, 1, 2, 0]}),
    "scripted keep": ("scripted", {"writers": [0, 2, 1, 1, 2, 0], "trigger": "keep"}),
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "bad_words": ("7",),
    "min_tokens": 5,
}

Open = Callable[..., TokenRouter]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens a deployment once per module."""
    routers: dict[str, TokenRouter] = {}

    def open_(policy: str = "single", params: dict[str, Any] | None = None, **options: Any) -> TokenRouter:
        key = json.dumps([policy, params, options], sort_keys=True)
        if key not in routers:
            folder = deployment(tmp_path_factory.mktemp("adapter"), policy, params, **options)
            routers[key] = TokenRouter.from_repository(folder)
        return routers[key]

    yield open_
    for router in routers.values():
        router.close()


def generate(router: TokenRouter, **fields: Any) -> list[Result]:
    return router.generate(PROMPTS, **{"max_tokens": 96, "seed": 11, **fields})


def trace(result: Result) -> tuple[Any, ...]:
    return result.text, result.tokens, result.runs, result.handoffs, result.finish_reason


def assert_equal(got: list[Result], want: list[Result], router: TokenRouter) -> None:
    assert [trace(result) for result in got] == [trace(result) for result in want]
    for name, subserver in router._driver.subservers.items():
        assert subserver.engine.blocks_leased == subserver.open_sequences == 0, name
        assert subserver.statistics.cache.lost_prefixes == subserver.statistics.cache.recomputed_tokens == 0, name


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_torch_engine(opened: Open, name: str, sampling: dict[str, Any]) -> None:
    policy, params = SETTINGS[name]
    fields = {"policy": policy, "policy_params": json.dumps(params), **sampling}
    router = opened()
    assert_equal(generate(router, **fields), generate(opened(engine=TORCH), **fields), router)


@pytest.mark.parametrize("name", OF_THREE)
def test_three_models(opened: Open, name: str) -> None:
    policy, params = OF_THREE[name]
    fields = {"policy": policy, "policy_params": json.dumps(params), **DRAWN}
    router = opened(models=THREE)
    got = generate(router, **fields)
    assert_equal(got, generate(opened(engine=TORCH, models=THREE), **fields), router)
    assert all(sum(result.tokens_by_model[model] for result in got) for model in THREE)


@pytest.mark.parametrize(
    ("policy", "params", "sampling"),
    [
        *((policy, params, GREEDY) for policy, params in INSIDE.items()),
        *((policy, params, GREEDY) for policy, params in INSIDE_ALWAYS.items()),
        ("citer", {}, DRAWN),
        ("collm", {}, DRAWN),
    ],
)
def test_routers_inside_the_model(opened: Open, policy: str, params: dict[str, Any], sampling: dict[str, Any]) -> None:
    router = opened(policy, params)
    want = generate(opened(engine=TORCH), policy=policy, policy_params=json.dumps(params), **sampling)
    assert_equal(generate(router, **sampling), want, router)
    assert sum(result.handoffs for result in want) > 0, "the setting routes nothing"


@pytest.mark.parametrize("policy", ["single", "rstitch", "me"])
def test_other_policies_beside_a_router_inside_the_model(opened: Open, policy: str) -> None:
    router = opened("r2r", {})
    want = generate(opened(engine=TORCH), policy=policy, policy_params="{}", **DRAWN)
    assert_equal(generate(router, policy=policy, policy_params="{}", **DRAWN), want, router)


def test_several_end_ids(opened: Open) -> None:
    ends = {"end_ids": "256,18,28"}
    fields = {"policy": "rstitch", "policy_params": '{"threshold": 0.01}'}
    router = opened(**ends)
    got = generate(router, **fields)
    assert_equal(got, generate(opened(engine=TORCH, **ends), **fields), router)
    assert {result.tokens[-1] for result in got} - {256}, "no response ended by another end id"


@pytest.mark.parametrize("policy", ["rstitch", "glimprouter"])
def test_prompts_in_chunks(opened: Open, policy: str) -> None:
    params = SETTINGS[policy][1]
    fields = {"policy": policy, "policy_params": json.dumps(params), **DRAWN}
    chunks = {"small": {"max_num_tokens": 17}, "large": {"max_num_tokens": 19}}
    router = opened(per_model=chunks)
    assert_equal(generate(router, **fields), generate(opened(engine=TORCH), **fields), router)


def test_in_a_worker_process(tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by default: the router, and the router inside the model, are built in another process."""
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    want = generate(opened(engine=TORCH), policy="r2r", policy_params="{}")
    with TokenRouter.from_repository(deployment(tmp_path, "r2r")) as router:
        assert_equal(generate(router), want, router)
