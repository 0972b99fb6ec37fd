"""Why a token was handed over: every decision is told, with what the policy compared, and changes nothing."""

from __future__ import annotations

import json
import operator
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.commands import run
from tests.support.repositories import emulated_spec, write_emulated
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import request, spec, writers
from tests.unit.speculation_worlds import POLICIES, SAMPLING, WORLDS, World, asked, told
from tokenrouter.cli import app
from tokenrouter.engines.emulated.signals import SignalsConfig
from tokenrouter.errors import InvalidRequest
from tokenrouter.messages import Decision, ModelInfo
from tokenrouter.policies.base import Policy
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.response import Result

pytestmark = pytest.mark.usefixtures("one_thread")

RELATIONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def check(result: Result, *, draws: bool = False) -> list[Decision]:
    """Decisions are those about the response, in order, and follow from what they say was compared."""
    decisions = result.decisions
    assert decisions is not None
    first, rest = decisions[0], decisions[1:]
    assert (first.why, first.model, first.target) == ("entry", "", rest[0].model)
    kept = [decision for decision in rest if decision.kept]
    assert [decision.token for decision in kept] == result.tokens
    assert [decision.model for decision in kept] == writers(result)
    assert [decision.position for decision in kept] == list(range(len(result.tokens)))
    assert [decision.position for decision in rest] == sorted(decision.position for decision in rest)
    for one, other in pairwise(rest):
        assert other.model == one.target
    for decision in rest:
        holds = [RELATIONS[each.relation](each.value, each.threshold) for each in decision.measures]
        if holds:
            assert all(holds) == (draws or decision.target != decision.model), decision
        assert decision.why in ("policy", "visit limit")
    return decisions


@settings(max_examples=15)
@given(world=WORLDS, name=POLICIES, sampling=SAMPLING, order=st.integers(0, 2**32))
def test_decisions_are_those_of_plain_routing_and_change_no_token(
    routers: str, world: World, name: str, sampling: dict[str, Any], order: int
) -> None:
    requests = asked(world.policy(name, routers), sampling)
    found: list[list[Result]] = []
    for ahead, explain in ((False, False), (False, True), (True, True)):
        cluster = world.cluster(ahead=ahead)
        keys = [cluster.submit(replace(each, explain=explain)) for each in requests]
        cluster.walk(random.Random(order))
        cluster.deliver_all()
        found.append([cluster.result(key) for key in keys])
        assert all(cluster.subserver(model)._runner.explaining == 0 for model in cluster.models)
    for silent, plain, ahead_of_it in zip(*found, strict=True):
        assert silent.decisions is None
        assert told(silent) == told(plain) == told(ahead_of_it)
        expected = check(plain, draws=name == "markov")
        assert len(check(ahead_of_it, draws=name == "markov")) == len(expected)
        for one, other in zip(ahead_of_it.decisions or [], expected, strict=True):
            assert replace_measures(one) == replace_measures(other)
            assert [each.value for each in one.measures] == pytest.approx([each.value for each in other.measures])


def replace_measures(decision: Decision) -> tuple[Any, ...]:
    names = [(each.name, each.relation, each.threshold) for each in decision.measures]
    return (decision.position, decision.token, decision.model, decision.target, decision.kept, decision.why, names)


def response(policy: Any, *, leave: float = 0.4, models: tuple[str, ...] = ("small", "large")) -> Result:
    cluster = Cluster(models, engine={"repeat": True}, per_model={"small": {"signals": SignalsConfig(leave)}})
    key = cluster.submit(replace(request(list(range(1, 30)), max_tokens=24, policy=policy, seed=5), explain=True))
    cluster.run()
    return cluster.result(key)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("entropy", {"entropy"}),
        ("immediate", {"aleatoric"}),
        ("momentum", {"momentum"}),
        ("rolling", {"aleatoric", "entropy", "mean aleatoric"}),
        ("duo_rolling", {"aleatoric", "mean aleatoric"}),
    ],
)
def test_what_r2r_s_strategies_look_at(strategy: str, names: set[str]) -> None:
    found = check(response(spec("r2r", strategy=strategy)))
    looked = {each.name for decision in found for each in decision.measures}
    assert looked
    assert looked <= names


def test_draws_and_prompts() -> None:
    found = check(response(spec("me", weights=[1.0, 2.0])), draws=True)
    assert [each.name for each in found[0].measures] == ["u"]
    found = check(response(spec("query_level", router="length", min_tokens=5, threshold=0.5)))
    assert [(each.name, each.value, each.threshold) for each in found[0].measures] == [("win_rate", 1.0, 0.5)]
    assert found[0].target == "large"
    assert all(decision.measures == () for decision in found[1:])


def test_max_prob_and_visit_limits() -> None:
    found = check(response(spec("rstitch", measure="max_prob", threshold=0.5)))
    assert {each.name for decision in found for each in decision.measures} == {"max_prob"}
    found = check(response(spec("random", p=0.5)))
    assert {decision.why for decision in found if decision.model == "large"} == {"visit limit"}


def test_a_policy_that_cannot_explain_itself_is_followed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Policy, batch: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("tokenrouter.policies.random.Random.explain", broken)
    found = response(spec("random", p=0.5))
    assert all(decision.measures == () for decision in check(found))


def test_what_cannot_be_explained_is_refused() -> None:
    cluster = Cluster(engine={"repeat": True})
    plain = ModelInfo(PROTOCOL_VERSION, "small", "tensorrt_llm", False, 300, 64, 4, 64, speculates=False)
    cluster.orchestrator.speculation.connected("small", plain)
    with pytest.raises(InvalidRequest, match="explain is true, but the engine of model 'small' owns its decoding loop"):
        cluster.submit(replace(request([1, 2]), explain=True))


def test_the_command(tmp_path: Path) -> None:
    repository = write_emulated(tmp_path, emulated_spec())
    options = ["--offline", repository, "--max-tokens", 6, "--seed", 5, "--policy", "random"]
    done = run(app, "explain", "abcdefgh", *options, "--policy-params", '{"p": 0.5}')
    assert done.exit_code == 0, done.output
    for text in ("small", "large", "visit limit", "discarded", "< 0.5", "u 0."):
        assert text in done.stdout
    as_json = run(app, "explain", "abcdefgh", *options, "--json")
    decisions = json.loads(as_json.stdout)["decisions"]
    assert decisions[0]["why"] == "entry"
    assert sum(decision["kept"] for decision in decisions) == 6
    many = run(app, "explain", "a", "--offline", repository, "--max-tokens", 5000)
    assert (many.exit_code, "at most 4096 tokens are explained" in many.stderr) == (2, True)


def test_the_text_of_what_was_sampled(tmp_path: Path) -> None:
    repository = write_emulated(tmp_path, emulated_spec())
    done = run(app, "explain", "abcd", "--offline", repository, "--max-tokens", 4, "--policy", "random", "--json")
    decisions = json.loads(done.stdout)["decisions"]
    assert decisions[0]["text"] == ""
    assert "".join(decision["text"] for decision in decisions if decision["kept"]) == "abcd"
