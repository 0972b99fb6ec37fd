"""The standard-serving baseline through a real server: the same tokens as ours, from KV that outlives the calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perf.baselines.standard import CallFailed, Run, StandardServing
from tokenrouter.errors import InvalidRequest
from tokenrouter.offline import TokenRouter
from tokenrouter.request import RequestFields
from tokenrouter.response import Result

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
PROMPTS = ("Start 91: -38, *2, -47 =", "Start 213: -133, +632, -615, *2 =")
POLICIES: dict[str, dict[str, Any]] = {
    "rstitch": {"threshold": 0.03},
    "r2r": {},
    "random": {"p": 0.4},
    "me": {"weights": [0.6, 0.4]},
    "glimprouter": {"threshold": 0.0},
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.8},
    "hot": {"temperature": 3.0, "top_k": 50, "frequency_penalty": 0.5, "min_tokens": 8},
}
CASES = {
    (policy, sampling, prompt): RequestFields(
        text_input=prompt,
        max_tokens=48,
        seed=2**40 + 7 * index,
        policy=policy,
        policy_params=json.dumps(POLICIES[policy]),
        **SAMPLINGS[sampling],
    )
    for index, (policy, sampling, prompt) in enumerate(
        (policy, sampling, prompt) for policy in POLICIES for sampling in SAMPLINGS for prompt in PROMPTS
    )
}

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def serving() -> Iterator[StandardServing]:
    """The baseline on the demo pair."""
    with StandardServing(REPOSITORY) as running:
        yield running


@pytest.fixture(scope="module")
def run(serving: StandardServing) -> Run:
    """All cases in one closed loop, so that steps mix policies, samplings, prefills and decodes."""
    return serving.run(CASES.values(), in_flight=6)


@pytest.fixture(scope="module")
def ours() -> list[Result]:
    """The same requests through TokenRouter's own state machines."""
    with TokenRouter.from_repository(REPOSITORY) as router:
        return router.generate(list(CASES.values()))


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(case[:2]) for case in CASES])
def test_same_tokens_and_writers_as_ours(run: Run, ours: list[Result], case: int) -> None:
    response, result = run.responses[case], ours[case]
    assert response.ids == result.tokens
    assert response.writers == [r.model for r in result.runs for _ in range(r.start, r.end)]
    assert (response.finish_reason, response.handoffs) == (result.finish_reason, result.handoffs)


def test_cases_are_worth_comparing(ours: list[Result]) -> None:
    """Requests change the model, and samplings differ."""
    for policy in POLICIES:
        results = [result for case, result in zip(CASES, ours, strict=True) if case[0] == policy]
        assert any(result.handoffs and result.tokens_by_model["large"] for result in results), policy
    hot = [result.tokens for case, result in zip(CASES, ours, strict=True) if case[1] == "hot"]
    assert len({str(tokens) for tokens in hot}) == len(hot)


def test_calls_run_only_what_the_model_has_not_seen(serving: StandardServing) -> None:
    """KV outlives the calls: no model runs a token of a response twice, however often the request comes back."""
    prompts = [[10 * first + i for i in range(20)] for first in range(1, 5)]
    run = serving.run(
        [
            RequestFields(
                input_ids=prompt, max_tokens=40, end_id=-1, seed=3, policy="random", policy_params='{"p": 0.4}'
            )
            for prompt in prompts
        ],
        in_flight=3,
    )
    for response in run.responses:
        assert response.handoffs > 10
        assert 40 <= response.ran["small"] <= 60
        assert response.ran["large"] <= 60


def test_errors_name_the_cause(serving: StandardServing) -> None:
    with pytest.raises(InvalidRequest, match="stop_words"):
        serving.run([RequestFields(text_input="start 1", max_tokens=4, stop_words=("x",))], in_flight=1)
    with pytest.raises(CallFailed, match=r"small.*context of 1024"):
        serving.run([RequestFields(input_ids=[5] * 1100, max_tokens=4)], in_flight=1)
    assert serving.run([RequestFields(text_input="start 1", max_tokens=4, seed=1)], in_flight=1).tokens > 0
