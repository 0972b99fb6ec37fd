"""The plan against closed forms, against itself under other rates and objectives, and what the command refuses."""

from __future__ import annotations

import json
import math
import operator
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tools.plan.__main__ as cli
from tests.support.commands import run
from tools.dtmc.profile import ModelProfile, Profile, dump_profile, load_profile, parse_profile
from tools.errors import CommandError
from tools.plan.bounds import alone_ms, least_replicas
from tools.plan.candidate import Candidate
from tools.plan.demand import Arrival, Demand, Objectives, Source, trace_demand
from tools.plan.evaluate import Prediction, evaluate, sliced
from tools.plan.pool import Pool
from tools.plan.search import FINAL_REQUESTS, ROUGH_REQUESTS, Plan, Planner
from tools.prices import read_prices
from tools.simulate.deployment import markov_policy

FILE = Path(__file__).parents[2] / "configs" / "profiles" / "r2r_batch_times.yaml"
R2R = load_profile(FILE)
ONE = parse_profile(
    "{models: {only: {step_ms: 10.0, max_batch: 1}}, entry: only, routing: {only: {only: 1.0}}, "
    "commit: {only: {only: 1}}}"
)


def planned(
    profile: Profile,
    demand: Demand,
    objectives: Objectives,
    *,
    prices: dict[str, float] | None = None,
    rough: int = 60,
    final: int = 120,
) -> Plan:
    """A plan on few requests, in this process."""
    with Pool(profile, demand, objectives) as pool:
        costs = prices or dict.fromkeys(profile.names, 1.0)
        return Planner(profile, demand, objectives, costs, pool, rough=rough, final=final).plan()


def with_model(profile: Profile, **fields: Any) -> Profile:
    models = {name: msgspec.structs.replace(model, **fields) for name, model in profile.models.items()}
    return msgspec.structs.replace(profile, models=models)


def every(gap_s: float, *, output_tokens: int = 1) -> Demand:
    """Arrivals at equal distances."""
    trace = tuple(Arrival(gap_s * number, 1, output_tokens) for number in range(5))
    return Demand(1.0 / gap_s, trace=trace)


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap_s", "needed"), [(0.012, 1), (0.006, 2), (0.004, 3), (0.0026, 4)])
def test_deterministic_arrivals_at_single_servers(gap_s: float, needed: int) -> None:
    """D/D/c: a service takes 10 ms, so ceil(10 ms / gap) servers are needed, and nobody waits then."""
    plan = planned(ONE, every(gap_s), Objectives(10.5, 10.5))
    assert plan.chosen.replicas == (needed,)
    assert plan.prediction.ttft_p99_ms == pytest.approx(10.0)
    assert plan.prediction.utilisation["only"] == pytest.approx(0.010 / gap_s / needed, rel=0.02)
    assert [each.replicas for each in plan.smaller] == ([(needed - 1,)] if needed > 1 else [])
    for found in plan.smaller.values():
        assert found.misses[0].startswith("time to first token p99")


def test_kv_for_so_many_requests_at_once() -> None:
    """Batches cost nothing; 20 tokens take 200 ms, 50 arrive a second: 10 in flight, and KV of a replica holds 3."""
    profile = with_model(ONE, max_batch=None, kv_tokens=3 * 21)
    plan = planned(profile, every(0.02, output_tokens=20), Objectives(21.0, 10.5))
    assert plan.chosen.replicas == (4,)
    assert plan.prediction.mean_in_flight == pytest.approx(10.0, rel=0.05)


def waiting_below(time_ms: float, rate: float, service_ms: float) -> float:
    """P(W <= t) of M/D/1 (Erlang 1909; Crommelin 1932)."""
    per_ms, load = rate / 1000.0, rate * service_ms / 1000.0
    left = (per_ms * (time_ms - k * service_ms) for k in range(int(time_ms // service_ms) + 1))
    return (1.0 - load) * sum((-x) ** k / math.factorial(k) * math.exp(x) for k, x in enumerate(left))


def test_poisson_arrivals_at_one_server_wait_as_in_m_d_1() -> None:
    demand = Demand(60.0)
    found = evaluate(ONE, Candidate((1,)), demand, Objectives(1e6, 1e6), requests=8_000)
    assert waiting_below(found.ttft_p50_ms - 10.0, 60.0, 10.0) == pytest.approx(0.5, abs=0.03)
    assert waiting_below(found.ttft_p99_ms - 10.0, 60.0, 10.0) == pytest.approx(0.99, abs=0.004)
    assert found.utilisation["only"] == pytest.approx(0.6, rel=0.03)
    # So an objective above the known percentile needs one server, and one below it another.
    exact_ms = next(t for t in range(1000) if waiting_below(t, 60.0, 10.0) >= 0.99) + 10.0
    for objective_ms, needed in ((1.3 * exact_ms, 1), (0.7 * exact_ms, 2)):
        plan = planned(ONE, demand, Objectives(objective_ms, 1e6), rough=1000, final=3000)
        assert plan.chosen.replicas == (needed,)


def test_one_response_alone() -> None:
    """100 tokens: a step of 6 ms each, and with p = 0.35 one of 27.9 ms and two hand-offs; 200 tokens of the prompt."""
    demand = Demand(1.0, 200, 100, "fixed")
    per_token_ms = 6.0 + 0.35 * (27.9 + 2 * 0.5)
    assert alone_ms(R2R, demand) == pytest.approx(100 * per_token_ms + 200 * (0.004 + 0.08))
    assert least_replicas(R2R, demand) == (1, 1)


# --- what the run counts ----------------------------------------------------------------------------------------------


def test_the_number_in_flight_is_settled_when_counting_begins() -> None:
    """Little's law, from a start that knows nothing of batches: arrivals times the time of a response."""
    demand = Demand(30.0, 50, 60.0)
    found = evaluate(R2R, Candidate((2, 3)), demand, Objectives(1e6, 1e6), requests=600)
    assert found.mean_in_flight == pytest.approx(
        30.0 * found.mean_in_flight / (found.tokens_per_second / 60.0), rel=0.1
    )
    assert found.tokens_per_second == pytest.approx(30.0 * 60.0, rel=0.1)
    assert found.complete
    assert found.requests == 600


def test_what_is_hopeless_ends_early_and_says_what_it_misses() -> None:
    demand = Demand(300.0)
    objectives = Objectives(50.0, 1e6)
    early = evaluate(ONE, Candidate((1,)), demand, objectives, requests=1000)
    whole = evaluate(ONE, Candidate((1,)), demand, objectives, requests=1000, to_the_end=True)
    assert not early.complete
    assert early.requests < 200
    assert whole.complete
    assert not early.holds
    assert not whole.holds
    assert whole.ttft_p99_ms > 1000.0


def test_all_deployments_and_rates_see_the_same_requests() -> None:
    policy = markov_policy(R2R)
    slow, fast = (Source(Demand(rate, 10, 40.0), policy, seed=3) for rate in (2.0, 8.0))
    for _ in range(50):
        assert fast.gap_ns() == pytest.approx(slow.gap_ns() / 4, abs=1)
        one, other = slow.request(), fast.request()
        assert (one.sampling, one.tokens) == (other.sampling, other.tokens)
    assert Source(Demand(2.0, 10, 40.0), policy, seed=4).request() != Source(Demand(2.0, 10, 40.0), policy, 3).request()


def test_requests_that_are_found_running_are_long_ones_somewhere_in_their_middle() -> None:
    """Of lengths 10 and 90, equally frequent, nine in ten are 90 long; what is left is half of a length and a half."""
    trace = (Arrival(0.0, 5, 10), Arrival(1.0, 5, 90))
    found = Source(Demand(1.0, trace=trace), markov_policy(R2R), seed=0).residents(4000)
    left = [request.sampling.max_tokens for request in found]
    assert all(len(request.tokens) - 5 + request.sampling.max_tokens in (10, 90) for request in found)
    expected = 0.1 * 5.5 + 0.9 * 45.5
    assert sum(left) / len(left) == pytest.approx(expected, rel=0.03)


def test_a_thousand_replicas_are_one_fleet() -> None:
    """Each has KV for one request of mean length, and all are used."""
    profile = with_model(R2R, kv_tokens=60)
    demand = Demand(100.0, 8, 20.0, "fixed")
    found = evaluate(profile, Candidate((1000, 1000)), demand, Objectives(1e6, 1e6), requests=200)
    assert found.mean_batch == {"small": 1.0, "large": 1.0}
    assert found.mean_in_flight == pytest.approx(100.0 * alone_ms(profile, demand) * 1e-3, rel=0.2)


def test_a_slice_behaves_like_its_fleet_and_never_better() -> None:
    """48 replicas of each model and 8 of them with every sixth arrival: the same times within a tenth or so."""
    profile = with_model(R2R, kv_tokens=400)
    demand, objectives, fleet = Demand(150.0, 8, 20.0), Objectives(1e6, 1e6), Candidate((48, 48))
    assert sliced(fleet, demand, 8) == (Candidate((8, 8), max_inflight=174763), replace(demand, every=6.0))
    assert sliced(Candidate((8, 300)), demand, 8) == (Candidate((8, 300)), demand)
    whole, part = (evaluate(profile, fleet, demand, objectives, requests=1200, least=kind) for kind in (None, 8))
    for name in ("ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.1)
    assert 0.95 <= part.ttft_p99_ms / whole.ttft_p99_ms <= 1.25
    assert part.mean_in_flight == pytest.approx(whole.mean_in_flight, rel=0.15)
    assert part.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=0.15)
    assert whole.peak_in_flight <= part.peak_in_flight <= 2 * whole.peak_in_flight


@pytest.mark.parametrize("trace", [(), tuple(Arrival(0.1 * i * i, 3, 4) for i in range(5))], ids=["poisson", "trace"])
def test_every_third_arrival_comes_at_a_third_of_the_rate(trace: tuple[Arrival, ...]) -> None:
    every, all_of_them = (Source(Demand(2.0, trace=trace, every=k), markov_policy(R2R), 0) for k in (3.0, 1.0))
    thirds = [every.gap_ns() for _ in range(2000)]
    assert sum(thirds) / 2000 == pytest.approx(3 / 2.0 * 1e9, rel=0.03)
    if trace:
        singles = [all_of_them.gap_ns() for _ in range(31)]
        assert thirds[1:11] == [pytest.approx(sum(singles[1 + 3 * i : 4 + 3 * i]), abs=5) for i in range(10)]
    else:
        # Erlang with three stages: its spread is 1/sqrt(3) of its mean.
        assert statistics.pstdev(thirds) == pytest.approx(1.5e9 / math.sqrt(3.0), rel=0.05)


# --- what is found ----------------------------------------------------------------------------------------------------


@st.composite
def deployments(draw: st.DrawFn) -> tuple[Profile, Demand, Objectives]:
    """Two models whose batches cost something, with KV for few or many."""
    small = draw(st.floats(1.0, 5.0))
    large = small * draw(st.floats(1.5, 5.0))
    leave = draw(st.floats(0.1, 0.6))
    models = {
        name: ModelProfile(
            step_ms={1: step, 16: step * draw(st.floats(1.5, 6.0))},
            max_batch=draw(st.integers(2, 16)),
            kv_tokens=draw(st.integers(60, 600)),
        )
        for name, step in (("small", small), ("large", large))
    }
    profile = Profile(
        models=models,
        entry="small",
        routing={"small": {"small": 1 - leave, "large": leave}, "large": {"small": 1.0}},
        commit={"small": {"small": 1}, "large": {"small": 1}},
        handoff_ms=draw(st.sampled_from([0.0, 0.4])),
    )
    demand = Demand(draw(st.floats(20.0, 60.0)), 4, 6.0, "fixed")
    alone = alone_ms(profile, demand) / 6.0
    return profile, demand, Objectives(12.0 * alone, draw(st.floats(5.0, 12.0)) * (small + large))


@settings(max_examples=3)
@given(case=deployments())
def test_more_requests_or_stricter_objectives_never_need_less(case: tuple[Profile, Demand, Objectives]) -> None:
    """Half as many requests again, on the same luck; and objectives of three quarters."""
    profile, demand, objectives = case
    base = planned(profile, demand, objectives)
    busier = planned(profile, replace(demand, rate=1.5 * demand.rate), objectives)
    assert busier.cost >= base.cost
    assert base.prediction.holds
    assert all(not found.holds for found in base.smaller.values())
    strict = Objectives(0.75 * objectives.ttft_p99_ms, 0.75 * objectives.itl_p99_ms)
    with suppress(CommandError):  # that nothing holds them
        assert planned(profile, demand, strict).cost >= base.cost


class Judge(Pool):
    """Instead of a simulation: so many replicas suffice, by the number of requests on which they are tried."""

    def __init__(self, needed: dict[int, tuple[int, int]]) -> None:
        super().__init__(R2R, Demand(1.0), Objectives(1.0, 1.0), workers=2)
        self.needed, self.asked = needed, 0

    def predict(
        self, candidates: Sequence[Candidate], requests: int, *, least: int, to_the_end: bool = False
    ) -> dict[Candidate, Prediction]:
        for each in candidates:
            self.asked += requests == FINAL_REQUESTS and (each, requests) not in self.seen
            enough = all(map(operator.ge, each.replicas, self.needed[requests]))
            misses = () if enough else ("too few",)
            self.seen[each, requests] = Prediction(1, 1, 1, 1, misses, requests, 1, {}, {}, 1, 1, complete=True)
        return {each: self.seen[each, requests] for each in candidates}


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.05, 1.3])
@pytest.mark.parametrize("few", [(1, 2), (110, 760)])
def test_what_was_tried_on_few_requests_is_soon_mended_on_many(few: tuple[int, int], factor: float) -> None:
    """However far off the trials were, a plan of a thousand replicas needs some twenty runs on many, not a hundred."""
    many = tuple(math.ceil(factor * count) for count in few)
    with Judge({ROUGH_REQUESTS: few, FINAL_REQUESTS: many}) as judge:
        demand = Demand(0.2 * few[1], 20, 40.0)
        plan = Planner(R2R, demand, Objectives(1e6, 1e6), dict.fromkeys(R2R.names, 1.0), judge).plan()
    for found, needed in zip(plan.chosen.replicas, many, strict=True):
        assert needed <= found <= math.ceil(1.02 * needed)
    assert judge.asked <= 30


def test_prices_decide_which_replicas_are_saved() -> None:
    """Whatever a replica costs, the plan is the cheaper one by its own prices."""
    profile = with_model(R2R, kv_tokens=2000)
    demand, objectives = Demand(12.0, 20, 40.0), Objectives(400.0, 110.0)
    prices = {"small": {"small": 10.0, "large": 1.0}, "large": {"small": 1.0, "large": 10.0}}
    found = {dear: planned(profile, demand, objectives, prices=price) for dear, price in prices.items()}
    for dear, price in prices.items():
        for other in found.values():
            replicas = dict(zip(profile.names, other.chosen.replicas, strict=True))
            assert found[dear].cost <= sum(replicas[name] * price[name] for name in replicas) + 1e-9


def test_max_inflight_is_what_kv_allows_at_most() -> None:
    profile = with_model(R2R, kv_tokens=1500)
    plan = planned(profile, Demand(10.0, 20, 40.0), Objectives(500.0, 120.0))
    assert plan.prediction.peak_in_flight <= plan.chosen.max_inflight <= min(plan.chosen.replicas) * (1500 // 60)


def test_thresholds_are_a_share_of_the_requests_in_flight() -> None:
    candidate = Candidate((1, 2), share=0.3)
    table = candidate.thresholds(R2R)["large"]
    assert list(candidate.thresholds(R2R)) == ["large"]
    assert all(1 <= threshold <= n for n, threshold in table.items())
    assert (table[1], table[16], max(table)) == (1, 5, 128)
    assert Candidate((1, 2)).thresholds(R2R) == {}
    assert Candidate((1, 2)).max_queue_delay_ms(R2R, 8) is None


# --- the command ------------------------------------------------------------------------------------------------------

LOAD = ("--rate", "8", "--prompt-tokens", "20", "--output-tokens", "20")
OBJECTIVES = ("--ttft-p99-ms", "400", "--itl-p99-ms", "150")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests, in this process."""
    monkeypatch.setattr(
        Planner.__init__, "__kwdefaults__", {**Planner.__init__.__kwdefaults__, "rough": 60, "final": 120}
    )
    monkeypatch.setattr(cli, "cores", lambda: 1)


@pytest.mark.usefixtures("quick")
def test_the_command_as_text_and_as_json(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("{small: 1.5, large: 6}")
    picture = tmp_path / "plan.png"
    shown = run(cli.main, "--profile", FILE, *LOAD, *OBJECTIVES, "--prices", prices, "--plot", picture)
    assert shown.exit_code == 0, shown.output
    assert "max_inflight" in shown.output
    assert picture.stat().st_size > 1000
    result = run(cli.main, "--profile", FILE, *LOAD, *OBJECTIVES, "--prices", prices, "--json")
    found = json.loads(result.stdout)
    assert found["cost_per_hour"] == 1.5 * found["replicas"]["small"] + 6 * found["replicas"]["large"]
    assert found["predicted"]["ttft_p99_ms"] <= 400
    assert found["predicted"]["itl_p99_ms"] <= 150
    assert all(each["misses"] for each in found["smaller"])
    assert found["objectives"] == {"ttft_p99_ms": 400, "itl_p99_ms": 150}


@pytest.mark.usefixtures("quick")
def test_a_recorded_trace_and_its_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"at_s": 0.3 * i, "prompt_tokens": 10 + i, "output_tokens": 5 + i} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    recorded = trace_demand(trace, None)
    assert recorded.rate == pytest.approx(1 / 0.3)
    assert (recorded.mean_prompt, recorded.mean_output) == (19.5, 14.5)
    result = run(cli.main, "--profile", FILE, "--trace", trace, "--rate", "12", *OBJECTIVES, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["demand"] == {"rate": 12.0, "prompt_tokens": 19.5, "output_tokens": 14.5}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--rate", "8"), "give --rate, --prompt-tokens and --output-tokens, or --trace"),
        (("--rate", "0", "--prompt-tokens", "1", "--output-tokens", "1"), "--rate: 0; give a positive number"),
        (("--rate", "1", "--prompt-tokens", "0", "--output-tokens", "1"), "--prompt-tokens: 0; give 1 or more"),
        (("--rate", "1", "--prompt-tokens", "1", "--output-tokens", "0"), "--output-tokens: 0; give 1 or more"),
        ((*LOAD, "--trace", "{tmp}/none"), "leave --prompt-tokens and --output-tokens out"),
        (("--trace", "{tmp}/none"), "none: No such file or directory"),
        (("--trace", "{tmp}/backwards"), "backwards:2: at_s 1 is before 2; sort the lines"),
        (("--trace", "{tmp}/single"), "1 arrivals; give at least two, at different times"),
        (("--trace", "{tmp}/wrong"), "wrong:1: expected an object with at_s, prompt_tokens, output_tokens"),
        ((*LOAD, "--prices", "{tmp}/prices"), "has small; give a price per replica and hour for each of small, large"),
        ((*LOAD, "--plot", "{tmp}/plan.txt"), "--plot {tmp}/plan.txt: the name must end in .png or .svg or .pdf"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    arrival = '{"at_s": %s, "prompt_tokens": 1, "output_tokens": 1}\n'
    (tmp_path / "backwards").write_text(arrival % 2 + arrival % 1 + arrival % 3)
    (tmp_path / "single").write_text(arrival % 2)
    (tmp_path / "wrong").write_text('{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}')
    (tmp_path / "prices").write_text("{small: 1}")
    result = run(cli.main, "--profile", FILE, *OBJECTIVES, *(text.format(tmp=tmp_path) for text in arguments))
    assert result.exit_code == 2, result.output
    assert problem.format(tmp=tmp_path) in " ".join(result.output.split())


def test_objectives_that_nothing_holds_are_named() -> None:
    result = run(cli.main, "--profile", FILE, *LOAD, "--ttft-p99-ms", "400", "--itl-p99-ms", "20")
    assert result.exit_code == 2
    assert "--itl-p99-ms 20: no number of replicas holds it; one request alone has" in " ".join(result.output.split())


def test_a_request_that_fits_no_replica_is_named(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(dump_profile(with_model(R2R, kv_tokens=30)))
    result = run(cli.main, "--profile", profile, *LOAD, *OBJECTIVES)
    assert result.exit_code == 2
    assert "models.small.kv_tokens is 30; a request has 40 tokens in the mean" in " ".join(result.output.split())


def test_long_responses_end_where_kv_does_and_prompts_that_do_not_fit_are_named() -> None:
    profile, objectives = with_model(R2R, kv_tokens=30), Objectives(1e6, 1e6)
    found = evaluate(profile, Candidate((2, 2)), Demand(20.0, 8, 15.0), objectives, requests=60)
    assert found.requests == 60
    with pytest.raises(CommandError, match=r"kv_tokens is too low: prompt \(30 tokens\)"):
        evaluate(profile, Candidate((2, 2)), Demand(20.0, 30, 15.0), objectives, requests=10)


def test_prices_of_other_models_or_below_0_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    for text, problem in (
        ("{small: 1, large: -2}", "large is -2; give a positive number"),
        ("[1]", "give a price per replica"),
    ):
        file.write_text(text)
        with pytest.raises(CommandError, match=problem):
            read_prices(file, R2R)
