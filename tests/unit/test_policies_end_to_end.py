"""Every policy through the offline engine on the demo pair: batches, scheduler thresholds, ends, three models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenrouter.offline import TokenRouter
from tokenrouter.policies.checkpoints import DEFAULT_FOLDER
from tokenrouter.request import RequestFields
from tokenrouter.response import Result
from tools.build_repository.build import write_repository
from tools.build_repository.spec import BatchingSpec, load_spec
from tools.demo_models.task import Problem, check, load_problems

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
PROBLEMS = load_problems(ROOT / "configs/demo/problems.jsonl")[:8]
GLIMP = {"separator": "=", "think_end": "####"}

# Each leaves the small model somewhere in most answers, and stays in most places.
SETTINGS: dict[str, dict[str, Any]] = {
    "r2r": {},
    "citer": {},
    "collm": {},
    "rstitch": {"threshold": 0.03},
    "me": {"weights": [0.6, 0.4]},
    "glimprouter": {"threshold": 0.1, **GLIMP},
    "query_level": {"router": "classifier"},
    "random": {"p": 0.3},
}
# Settings under which the first token is a trigger.
ALWAYS: dict[str, dict[str, Any]] = {
    "r2r": {"threshold": 0.0},
    "citer": {"threshold": 1.0},
    "collm": {"threshold": 0.0},
    "rstitch": {"threshold": 0.0},
    "me": {"weights": [0.0, 1.0]},
    "glimprouter": {"threshold": 0.0, **GLIMP},
    "query_level": {"router": "length", "min_tokens": 1},
    "random": {"p": 1.0},
}

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "large/1/model.safetensors").exists() or not (REPOSITORY / DEFAULT_FOLDER).exists(),
    reason="the demo pair is not there",
)


@pytest.fixture(scope="module")
def router() -> Iterator[TokenRouter]:
    with TokenRouter.from_repository(REPOSITORY) as opened:
        yield opened


def fields(problem: Problem, policy: str, params: dict[str, Any], **more: Any) -> RequestFields:
    given = RequestFields(
        text_input=problem.prompt,
        max_tokens=96,
        policy=policy,
        policy_params=json.dumps(params),
        seed=7 + PROBLEMS.index(problem),
        temperature=0.0,
    )
    return replace(given, **more)


def together(router: TokenRouter, policy: str, params: dict[str, Any], **more: Any) -> list[Result]:
    return router.generate([fields(problem, policy, params, **more) for problem in PROBLEMS])


def trace(result: Result) -> tuple[Any, ...]:
    return result.text, tuple(result.tokens), result.handoffs, tuple(result.runs)


def deployment(folder: Path, *, batching: dict[str, int], models: tuple[str, ...] = ("small", "large")) -> Path:
    """A repository with the demo's checkpoints; "larger" is the large model under another name."""
    spec = load_spec(ROOT / "configs/demo.yaml")
    known = {**spec.models, "larger": spec.models["large"]}
    chosen = {}
    for name in models:
        source = REPOSITORY / ("large" if name == "larger" else name) / "1"
        rules = BatchingSpec(threshold=batching.get(name, 1), max_queue_delay_microseconds=2000)
        chosen[name] = _with(known[name], checkpoint=str(source), batching=rules)
    write_repository(_with(spec, models=chosen, entry=_with(spec.entry, policy="me", policy_params={})), folder)
    shutil.copytree(REPOSITORY / DEFAULT_FOLDER, folder / DEFAULT_FOLDER)
    return folder


def _with(struct: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(struct, **changes)


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenRouter]:
    folder = deployment(tmp_path_factory.mktemp("delayed"), batching={"small": 2, "large": 3})
    with TokenRouter.from_repository(folder) as opened:
        yield opened


@pytest.mark.parametrize("policy", SETTINGS)
def test_decisions_do_not_depend_on_what_else_is_in_the_batch(router: TokenRouter, policy: str) -> None:
    params = SETTINGS[policy]
    alone = [router.generate([fields(problem, policy, params)])[0] for problem in PROBLEMS]
    assert [trace(result) for result in together(router, policy, params)] == [trace(result) for result in alone]
    writers = {model for result in alone for model, count in result.tokens_by_model.items() if count}
    assert writers == {"small", "large"}, "the setting routes nothing"


@pytest.mark.parametrize(
    "params",
    [
        {"strategy": "momentum", "aleatoric_threshold": 2.28, "quick_to_ref_threshold": 0.2},
        {"strategy": "rolling", "aleatoric_threshold": 2.1},
        {"strategy": "neural_rolling", "threshold": 0.01},
    ],
    ids=lambda params: params["strategy"],
)
def test_what_a_strategy_remembers_is_the_requests_own(
    router: TokenRouter, delayed: TokenRouter, params: dict[str, Any]
) -> None:
    alone = [trace(router.generate([fields(problem, "r2r", params)])[0]) for problem in PROBLEMS]
    assert [trace(result) for result in together(router, "r2r", params)] == alone
    assert [trace(result) for result in together(delayed, "r2r", params)] == alone
    assert sum(handoffs for _, _, handoffs, _ in alone) > len(PROBLEMS)


@pytest.mark.parametrize("policy", SETTINGS)
def test_decisions_do_not_depend_on_the_scheduler(router: TokenRouter, delayed: TokenRouter, policy: str) -> None:
    params = SETTINGS[policy]
    expected = [trace(result) for result in together(router, policy, params)]
    assert [trace(result) for result in together(delayed, policy, params)] == expected


@pytest.mark.parametrize("policy", ALWAYS)
def test_the_very_first_token_can_be_a_trigger(router: TokenRouter, policy: str) -> None:
    for result in together(router, policy, ALWAYS[policy], max_tokens=5):
        assert result.runs[0].model == "large"
        assert result.tokens_by_model.get("small", 0) <= (0 if policy != "glimprouter" else 4)


@pytest.mark.parametrize("policy", ALWAYS)
@pytest.mark.parametrize("limit", [1, 4])
def test_the_limit_can_be_reached_at_the_large_model(router: TokenRouter, policy: str, limit: int) -> None:
    for result in together(router, policy, ALWAYS[policy], max_tokens=limit):
        assert result.finish_reason == "length"
        assert len(result.tokens) == limit
        assert result.runs[-1].model == "large"


@pytest.mark.parametrize(("p", "model"), [(0.0, "small"), (1.0, "large")])
def test_random_with_certainty_is_one_model_alone(router: TokenRouter, p: float, model: str) -> None:
    routed = together(router, "random", {"p": p})
    alone = together(router, "single", {"model": model})
    assert [result.tokens for result in routed] == [result.tokens for result in alone]
    assert {name for result in routed for name in result.tokens_by_model if result.tokens_by_model[name]} == {model}


@pytest.mark.parametrize("policy", ["r2r", "citer", "rstitch"])
def test_learned_and_entropy_routing_answers_what_the_small_model_cannot(router: TokenRouter, policy: str) -> None:
    problems = load_problems(ROOT / "configs/demo/problems.jsonl")[:40]

    def right(name: str, params: dict[str, Any]) -> int:
        results = router.generate(
            [problem.prompt for problem in problems], max_tokens=96, policy=name, policy_params=json.dumps(params)
        )
        pairs = zip(problems, results, strict=True)
        return sum(check(problem.prompt, result.text, problem.answer) for problem, result in pairs)

    assert right(policy, SETTINGS[policy]) >= right("single", {"model": "small"}) + 10


def test_an_ensemble_of_three_models_in_one_request(router: TokenRouter, tmp_path: Path) -> None:
    """The third model is the large one again, so greedy answers of weights on it alone are the large model's."""
    folder = deployment(tmp_path, batching={}, models=("small", "large", "larger"))
    with TokenRouter.from_repository(folder) as three:
        mixed = together(three, "me", {"weights": {"small": 1, "large": 1, "larger": 1}})
        last = together(three, "me", {"weights": {"small": 0, "large": 0, "larger": 1}})
        pair = together(three, "me", {"weights": {"small": 0, "large": 1, "larger": 1}})
    alone = together(router, "single", {"model": "large"})
    for results in (last, pair):
        assert [result.tokens for result in results] == [result.tokens for result in alone]
    for result in mixed:
        assert sorted(name for name, count in result.tokens_by_model.items() if count) == ["large", "larger", "small"]
        assert sum(result.tokens_by_model.values()) == len(result.tokens)
