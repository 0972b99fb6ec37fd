"""Traces: a replay makes the visits of the recorded response, and files are checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perf.emulated.deployment import EmulatedDeployment
from perf.emulated.routing import policy_params, routed
from perf.emulated.signals import ROUTED_BY_SIGNALS
from perf.traces.trace import Trace, agreement, from_routing, moves, read_traces, traced, write_traces
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import request, spec
from tests.unit.policy_harness import make
from tests.unit.test_emulated_signals import responses, router_policy
from tokenrouter.errors import InvalidRequest
from tokenrouter.messages import PolicySpec
from tokenrouter.offline import TokenRouter
from tokenrouter.response import Result
from tokenrouter.speculation import Speculation
from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import Profile, load_profile

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
R2R = load_profile(PROFILES / "r2r_qwen3_0.6b_32b.yaml")
ME = load_profile(PROFILES / "me_qwen3_0.6b_8b_32b.yaml")


def routing(result: Result) -> dict[str, Any]:
    """As clients get it."""
    runs = [{"model": run.model, "start": run.start, "end": run.end} for run in result.runs]
    return json.loads(json.dumps({"runs": runs, **result.totals()}))


def replay(trace: Trace, models: Sequence[str] = ("small", "large")) -> Result:
    """The response of a deployment that replays the trace."""
    cluster = Cluster(tuple(models), engine={"repeat": True})
    policy = spec("scripted", **trace.script())
    key = cluster.submit(request([1, 2], max_tokens=len(trace.writers), policy=policy, end_ids=()))
    cluster.run()
    return cluster.result(key)


@pytest.mark.parametrize(("name", "back"), [("r2r", 1.0), ("citer", 1.0), ("collm", 1.0), ("random", 1.0), ("me", 1.0)])
def test_a_replay_makes_the_recorded_visits(name: str, back: float, tmp_path: Path) -> None:
    for result in responses(router_policy(name, tmp_path), back=back)[:4]:
        trace = from_routing(routing(result))
        assert trace.emulated
        again = replay(trace)
        assert (again.runs, again.handoffs) == (result.runs, result.handoffs)


def test_a_replay_of_rstitch_has_the_same_writers_and_no_visits_that_runs_do_not_show() -> None:
    for result in responses(PolicySpec("rstitch"), back=0.5)[:4]:
        trace = from_routing(routing(result))
        again = replay(trace)
        assert again.runs == result.runs
        assert again.handoffs <= result.handoffs
        assert again.handoffs == len(result.runs) - 1 + (result.runs[0].model == "large")


def test_runs_of_chunks_are_joined() -> None:
    runs = [{"model": "small", "start": i, "end": i + 1} for i in range(3)] + [{"model": "large", "start": 3, "end": 5}]
    trace = from_routing({"runs": runs, "policy": "rstitch", "handoffs": 1})
    assert trace.runs == (("small", 3), ("large", 2))
    assert not trace.emulated


@pytest.mark.parametrize(
    ("policy", "runs", "expected"),
    [
        # Over and over: small small large large. One token per visit, and a try at small before each of them.
        ("r2r", [("small", 2), ("large", 2)], {"ss1": 2, "sl0": 2, "ls1": 2}),
        ("rstitch", [("small", 2), ("large", 2)], {"ss1": 2, "sl0": 1, "ll1": 1, "ls1": 1}),
        ("me", [("small", 2), ("large", 2)], {"ss1": 1, "sl1": 1, "ll1": 1, "ls1": 1}),
    ],
)
def test_moves_of_a_replay(policy: str, runs: list[tuple[str, int]], expected: dict[str, int]) -> None:
    found = moves(Trace(policy, tuple(runs)), "small")
    assert {f"{a[0]}{b[0]}{int(kept)}": n for (a, b, kept), n in found.items()} == expected


def test_the_profile_of_traces_has_their_mean_routing() -> None:
    traces = [Trace("r2r", (("small", 6), ("large", 1))), Trace("r2r", (("small", 1), ("large", 2)))]
    profile = traced(R2R, traces)
    assert profile.routing["small"]["large"] == pytest.approx(0.3)
    assert profile.routing["large"] == {"small": 1.0, "large": 0.0}
    assert profile.commit["small"] == {"small": 1.0, "large": 0.0}
    with pytest.raises(ProfileError, match="'huge'"):
        traced(R2R, [Trace("r2r", (("huge", 1),))])


def test_files_are_read_back_and_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    traces = [Trace("r2r", (("small", 6), ("large", 1)), 2, True, "a"), Trace("me", (("large", 1),))]
    write_traces(traces, path)
    assert read_traces(path) == traces
    for text, named in (
        ('{"policy": "r2r", "runs": []}', ":1: .*runs"),
        ('\n{"policy": "markov", "runs": [["small", 1]]}', ":2: .*markov"),
        ('{"policy": "r2r", "runs": [["small", 0]]}', "no token"),
        ("{", "traces.jsonl:1"),
        ("", "no trace"),
    ):
        path.write_text(text)
        with pytest.raises(ProfileError, match=named):
            read_traces(path)
    with pytest.raises(ProfileError, match="missing"):
        read_traces(tmp_path / "missing")


@pytest.mark.parametrize("limit", [{"visit_tokens": 0, "trigger": "first"}, {"visit_tokens": 1}])
def test_scripts_refuse_limits_without_meaning(limit: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="visit_tokens"):
        make("scripted", {"writers": [0, 1], **limit})


def test_a_script_visits_three_models_and_hands_back() -> None:
    runs = (("small", 1), ("medium", 2), ("large", 1), ("small", 1))
    result = replay(Trace("r2r", runs), ("small", "medium", "large"))
    assert [(run.model, run.end - run.start) for run in result.runs] == list(runs)
    assert result.handoffs == 6
    assert replay(Trace("rstitch", runs), ("small", "medium", "large")).handoffs == 3


@pytest.mark.parametrize("policy", ["random", *ROUTED_BY_SIGNALS])
def test_a_policy_brings_its_own_matrices(policy: str) -> None:
    profile = routed(R2R, policy, leave_rate=0.5, return_rate=0.25 if policy == "rstitch" else None)
    assert profile.routing["small"] == {"small": 0.5, "large": 0.5}
    assert profile.routing["large"]["small"] == (0.25 if policy == "rstitch" else 1.0)
    assert profile.commit["small"] == {"small": 1.0, "large": 0.0}
    assert profile.commit["large"]["large"] == 1.0
    assert policy_params(profile, policy) == ({"p": 0.5} if policy == "random" else {})


def test_rates_come_from_the_profile_if_none_are_given() -> None:
    assert routed(R2R, "rstitch").routing == {
        "small": {"small": 0.65, "large": 0.35},
        "large": {"small": 1.0, "large": 0.0},
    }
    assert routed(ME, "me").routing["large"] == ME.routing["small"]
    assert routed(R2R, "markov") is R2R


@pytest.mark.parametrize(
    ("profile", "policy", "rates", "named"),
    [
        (R2R, "glimprouter", {}, "does not follow a profile"),
        (ME, "r2r", {}, "two models"),
        (R2R, "markov", {"leave_rate": 0.5}, "from the profile"),
        (R2R, "r2r", {"leave_rate": 0.0}, "rates"),
        (R2R, "rstitch", {"return_rate": 1.5}, "rates"),
        (R2R, "citer", {"return_rate": 0.5}, "one token per visit"),
    ],
)
def test_what_cannot_be_routed_is_refused(profile: Profile, policy: str, rates: dict[str, float], named: str) -> None:
    with pytest.raises(ProfileError, match=named):
        routed(profile, policy, **rates)


def test_a_trace_knows_how_often_the_large_model_agreed() -> None:
    routing = {"runs": [{"model": "small", "start": 0, "end": 2}], "policy": "r2r", "handoffs": 6}
    traces = [from_routing({**routing, "discards": 3, "agreed": 1}), from_routing(routing)]
    assert (traces[0].discards, traces[0].agreed) == (3, 1)
    assert agreement(traces) == pytest.approx(1 / 3)
    assert agreement(traces[1:]) is None


def test_a_replay_agrees_as_often_as_the_recorded_models_and_may_go_ahead(tmp_path: Path) -> None:
    trace = Trace("r2r", (("small", 3), ("large", 1)), discards=10, agreed=7)
    at_once = dict.fromkeys(R2R.names, 1e3)
    deployment = EmulatedDeployment(
        R2R, "scripted", 4, around_ms=at_once, agreement=agreement([trace]), speculation=Speculation(4)
    )
    fields = {"max_tokens": 800, "policy_params": json.dumps(trace.script())}
    with TokenRouter.from_repository(deployment.write(tmp_path / "repository")) as router:
        (plain,), (ahead,) = (router.generate(["abc"], speculation=each, **fields) for each in (False, True))
    assert (plain.tokens, plain.runs, plain.handoffs) == (ahead.tokens, ahead.runs, ahead.handoffs)
    totals = ahead.totals()
    assert totals["discards"] == plain.totals()["discards"] == 200
    assert totals["agreed"] / totals["discards"] == pytest.approx(0.7, abs=0.1)
