from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.baselines.inprocess import SynchronousBaseline
from perf.baselines.limits import throughput
from perf.baselines.turns import RULES, Rule, Thresholds
from perf.compare import __main__ as compare
from perf.compare import ideal, report
from perf.compare.cells import ANY, BY_NAME, OURS, Cell, named
from perf.compare.demo import POLICIES, demo_spec
from perf.compare.results import Results
from perf.compare.runs import summarise
from perf.compare.thresholds import Tuning
from perf.compare.workloads import load_reference
from perf.emulated.deployment import EmulatedDeployment
from perf.load.requests import Load, Request, Response, Run, random_prompts
from tokenrouter.errors import ConfigError
from tokenrouter.offline import TokenRouter
from tokenrouter.request import RequestFields
from tools.build_repository.spec import load_spec
from tools.dtmc.errors import ProfileError
from tools.errors import CommandError

REFERENCE = load_reference()
RULES_AND_TUNED = {**RULES, "model-sync tuned": Thresholds((1, 3, 2))}


def request(index: int, *, tokens: int = 12, whole: bool = True) -> Request:
    return Request(index, random_prompts(5, 94)(index), tokens, whole)


# --- the drivers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["r2r", "rstitch", "me"])
def repository(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that reads a router file, one that reads logits at both models, and one that draws; three models."""
    policy: str = request.param
    folder = tmp_path_factory.mktemp(policy)
    profile = REFERENCE.profile(policy, prefill=False)
    at_once = dict.fromkeys(profile.names, math.inf)
    return EmulatedDeployment(profile, policy, 8, around_ms=at_once).write(folder)


@pytest.fixture(scope="module")
def engines(repository: Path) -> Iterator[SynchronousBaseline]:
    with SynchronousBaseline(repository) as loaded:
        yield loaded


@pytest.mark.parametrize("name", RULES_AND_TUNED)
def test_a_synchronous_baseline_gives_the_tokens_that_we_give(
    repository: Path, engines: SynchronousBaseline, name: str
) -> None:
    run = engines.run(Load(9, random_prompts(5, 94), 12, warm_up_s=0.0, seconds=0.0), RULES_AND_TUNED[name])
    found = [response for response in run.responses if response.ended]
    requests = [response.request for response in found]
    fields = [RequestFields(input_ids=r.input_ids, max_tokens=r.max_tokens, seed=r.seed) for r in requests]
    with TokenRouter.from_repository(repository) as ours:
        expected = ours.generate(fields)
    assert [response.ids for response in found] == [result.tokens for result in expected]
    assert sum(request.whole for request in requests) >= 9
    assert sum(result.handoffs for result in expected) > 9


def test_a_closed_loop_measures_and_leaves_nothing_behind(engines: SynchronousBaseline) -> None:
    load = Load(3, random_prompts(5, 94), 8, warm_up_s=0.05, seconds=0.1)
    run = engines.run(load, RULES["lock-step"])
    assert run.end_s - run.start_s >= 0.1
    whole = [r for r in run.responses if r.request.whole and r.ended]
    assert len(whole) >= 3
    assert all(len(r.ids) == 8 == r.tokens for r in whole)
    assert [r.request.max_tokens for r in sorted(run.responses, key=lambda r: r.request.index)[:3]] == [3, 6, 8]
    assert all(subserver.open_sequences == 0 for subserver in engines._subservers)


def test_no_lock_step_on_emulated_engines_exceeds_its_exact_throughput(tmp_path: Path) -> None:
    profile = REFERENCE.profile("r2r", prefill=False)
    with SynchronousBaseline(EmulatedDeployment(profile, "r2r", 4).write(tmp_path)) as engines:
        run = engines.run(Load(4, random_prompts(5, 94), 32, warm_up_s=0.2, seconds=1.0), RULES["lock-step"])
    # A few hundred tokens: the draw alone moves the rate by some per cent.
    assert 0.0 < run.tokens_per_second < 1.15 * throughput(profile, 4, RULES["lock-step"])


# --- the sums ------------------------------------------------------------------------------------------------------


def response(index: int, sent_s: float, times: list[float], *, whole: bool = True, ended: bool = True) -> Response:
    result = Response(request=request(index, whole=whole), started=sent_s, ended=ended)
    for at_s in times:
        result.arrived(at_s, [0])
    return result


def test_a_summary_counts_tokens_in_the_window_and_times_of_whole_responses_that_end_there() -> None:
    run = Run(
        [
            response(0, 0.0, [0.5, 1.5], whole=False),
            response(1, 0.9, [1.0, 1.1, 1.4]),
            response(2, 1.5, [1.9, 2.1]),
            response(3, 1.6, [1.8], ended=False),
        ],
        start_s=1.0,
        end_s=2.0,
    )
    found = summarise(run)
    assert found["tokens_per_second"] == pytest.approx(6.0)
    assert found["responses"] == 1
    assert found["ttft_p50_ms"] == pytest.approx(100.0)
    assert found["itl_mean_ms"] == pytest.approx(200.0)
    assert found["e2e_p99_ms"] == pytest.approx(500.0)


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    one = Response(request=request(0), started=0.0, times=[1.0, 1.3], counts=[2, 1], ids=[1, 2, 3], ended=True)
    found = summarise(Run([one], 0.0, 2.0))
    assert found["itl_mean_ms"] == pytest.approx(150.0)
    assert found["itl_p50_ms"] == pytest.approx(150.0)


def test_without_whole_responses_there_are_no_latencies() -> None:
    found = summarise(Run([response(0, 0.0, [0.1], whole=False)], 0.0, 1.0))
    assert math.isnan(found["ttft_p50_ms"])
    assert found["tokens_per_second"] == 1.0


def test_percentiles_interpolate() -> None:
    found = summarise(Run([response(0, 0.0, [0.001]), response(1, 0.0, [0.003])], 0.0, 1.0))
    assert found["ttft_p50_ms"] == pytest.approx(2.0)


def test_a_load_ends_after_its_time_and_enough_whole_responses() -> None:
    load = Load(4, random_prompts(1, 94), 10, warm_up_s=1.0, seconds=2.0, longest_s=9.0)
    assert not load.over(2.9, 9)
    assert not load.over(3.0, 3)
    assert load.over(3.0, 4)
    assert load.over(10.0, 0)
    assert [load.request(i).max_tokens for i in range(5)] == [3, 5, 8, 10, 10]
    assert [load.request(i).whole for i in (3, 4)] == [False, True]


# --- files ---------------------------------------------------------------------------------------------------------


def filled() -> Results:
    results = Results({})
    cell = Cell("r2r", "low-effort", 4)
    results.add(cell, OURS, {"tokens_per_second": 200.0, "ttft_p50_ms": 10.0})
    results.add(cell, "lock-step", {"tokens_per_second": 100.0})
    results.add(cell, "eager", {"tokens_per_second": 205.0, "limit": math.nan})
    results.add(cell.of(BY_NAME["large only"]), "large only", {"tokens_per_second": 400.0})
    return results


def test_results_survive_the_file_and_a_later_row_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    results, cell = filled(), Cell("r2r", "low-effort", 4)
    results.save(tmp_path / "a.csv")
    again = Results.load(tmp_path / "a.csv")
    again.add(cell, "lock-step", {"tokens_per_second": 160.0})
    assert again.ratio(cell, "lock-step") == pytest.approx(1.25)
    assert again.ratio(cell, "large only") == pytest.approx(0.5)
    assert math.isnan(again.ratio(cell, "standard"))
    assert math.isnan(again.number(cell, "eager", "limit"))
    assert again.cells() == [cell]
    assert Results.load(tmp_path / "none.csv").rows == {}


def test_losses_are_named_for_routed_systems_only() -> None:
    results, cell = filled(), Cell("r2r", "low-effort", 4)
    # It is a column, and no baseline.
    results.add(cell, "speculative", {"tokens_per_second": 300.0})
    assert report.losses(results) == [(cell, "eager", pytest.approx(200 / 205))]
    assert "300.0 (0.67)" in report.markdown(results, "low-effort")


def test_speculation_is_measured_with_policies_that_allow_it_and_real_models_only() -> None:
    able = [policy for policy in (*POLICIES, "random", "markov") if BY_NAME["speculative"].takes(policy, real=True)]
    assert able == [policy for policy in (*POLICIES, "random", "markov") if policy != "me"]
    assert not BY_NAME["speculative"].takes("r2r", real=False)
    assert all(
        system.takes("me", real=real) for system in BY_NAME.values() for real in (True, False) if not system.ahead
    )


def test_tables_and_plot_name_every_system(tmp_path: Path) -> None:
    results = filled()
    text = report.markdown(results, "low-effort")
    assert "| r2r | 4 | 200.0 | 205.0 (0.98) | 400.0 (0.50) | 100.0 (2.00) |" in text
    assert len(report.tables(results, "emulated")) == 2
    report.plot(results, tmp_path / "plot.png", "emulated")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_system_without_routing_has_one_row_for_all_policies() -> None:
    cell = Cell("r2r", "low-effort", 4)
    assert cell.of(BY_NAME["small only"]).policy == ANY
    assert cell.of(BY_NAME["standard"]) == cell


# --- workloads and tuning ------------------------------------------------------------------------------------------


def test_the_reference_has_the_published_setting() -> None:
    profile = REFERENCE.profile("r2r", prefill=False)
    assert profile.routing["small"] == {"small": 0.65, "large": 0.35}
    assert profile.models["large"].step_ms == 27.9
    assert REFERENCE.profile("me", prefill=True).models["medium"].extend_ms_per_token > 0
    assert REFERENCE.workloads["high-effort"].scaled(32).response_tokens == 256
    assert [REFERENCE.workloads["agentic"].scaled(n).prompt_tokens for n in (1, 64, 10**6)] == [8192, 128, 4]
    with pytest.raises(ProfileError, match="no policy 'x'"):
        REFERENCE.profile("x", prefill=False)


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    with pytest.raises(ProfileError, match=r"no workload 'x'; workloads.yaml has low-effort, high-effort, agentic"):
        REFERENCE.workload("x")
    with pytest.raises(CommandError, match=r"--systems: no system 'x'; there are tokenrouter, speculative, eager"):
        named("x")


@pytest.mark.parametrize(("policy", "published"), [("citer", 102.29), ("collm", 47.46), ("rstitch", 43.06)])
def test_inferred_rates_give_the_published_throughput_in_relation_to_r2r(policy: str, published: float) -> None:
    one = {name: throughput(REFERENCE.profile(name, prefill=False), 1, RULES["lock-step"]) for name in ("r2r", policy)}
    assert one[policy] / one["r2r"] == pytest.approx(published / 73.27, rel=0.01)


def test_thresholds_are_searched_once_and_again_when_the_profile_changes(tmp_path: Path) -> None:
    path, profile = tmp_path / "kept.json", REFERENCE.profile("r2r", prefill=False)
    found = Tuning(path).ours("r2r", profile, 4)
    assert found.thresholds == {"small": 1, "large": 3}
    path.write_text(path.read_text().replace('"large": 3', '"large": 2'))
    assert Tuning(path).ours("r2r", profile, 4).thresholds["large"] == 2
    assert Tuning(path).model_sync("r2r", profile, 4).thresholds == (1, 3)
    other = REFERENCE.profile("collm", prefill=False)
    assert Tuning(path).ours("r2r", other, 4).thresholds["large"] == 4


def test_known_thresholds_are_read_and_new_ones_written_elsewhere(tmp_path: Path) -> None:
    known, path, profile = tmp_path / "known.json", tmp_path / "kept.json", REFERENCE.profile("r2r", prefill=False)
    Tuning(known).model_sync("r2r", profile, 4)
    known.write_text(re.sub(r"\d+(?=\n *\])", "7", known.read_text()))
    before = known.read_bytes()
    assert Tuning(path, known).model_sync("r2r", profile, 4).thresholds == (1, 7)
    assert not path.exists()
    assert Tuning(path, known).ours("r2r", profile, 4).thresholds == {"small": 1, "large": 3}
    assert Tuning(path).model_sync("r2r", profile, 4).thresholds == (1, 7)
    assert known.read_bytes() == before


def test_a_comparison_with_a_file_elsewhere_leaves_what_is_shipped_alone(tmp_path: Path) -> None:
    before = shipped()
    compare.main(
        policies=["r2r"], workloads=["low-effort"], inflight=[6], systems=["model-sync tuned"],
        scale=1024, seconds=0.1, warm_up=0.0, csv=tmp_path / "rows.csv",
    )  # fmt: skip
    compare.main(policies=["r2r"], inflight=[5], csv=tmp_path / "ideal.csv", only_ideal=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "rows.csv", "rows.png", "ideal.csv", "comparison_thresholds.json",
    }  # fmt: skip
    assert shipped() == before


def shipped() -> dict[Path, bytes]:
    """Whatever a comparison writes by default."""
    files = [*compare.RESULTS.rglob("comparison_*"), *compare.IMAGES.glob("comparison_*")]
    return {path: path.read_bytes() for path in files if path.is_file()}


def test_what_there_is_to_gain_without_overhead(tmp_path: Path) -> None:
    (row,) = ideal.rows(REFERENCE, Tuning(tmp_path / "kept.json"), ["r2r"], [4])
    assert (row["policy"], row["in_flight"]) == ("r2r", "4")
    assert float(row["lock-step"]) == pytest.approx(138.3, abs=0.05)
    assert float(row[OURS]) == pytest.approx(207.95, abs=0.006)
    assert float(row["nobody ever waits"]) == pytest.approx(4e3 / (6.0 + 0.35 * 27.9), abs=0.005)
    assert "207.9 | 253.7 (0.82) |" in ideal.markdown([row])


def test_the_demo_deployment_takes_policy_and_thresholds() -> None:
    spec = load_spec(Path(__file__).resolve().parents[2] / "configs" / "demo.yaml")
    profile = REFERENCE.profile("r2r", prefill=False)
    found = demo_spec(spec, "rstitch", {4: {"small": 1, "large": 3}}, profile, 4)
    assert found.entry.policy_params == POLICIES["rstitch"]
    assert found.models["large"].batching.batch_thresholds == {4: 3}
    assert demo_spec(spec, "me", {}, None, 4).models["large"].batching.threshold == 1
    with pytest.raises(ConfigError, match="no policy 'x'"):
        demo_spec(spec, "x", {}, None, 4)


def test_a_rule_is_known_for_every_system_in_this_process() -> None:
    rules: dict[str, Rule] = {**RULES, "model-sync tuned": Thresholds((1, 1))}
    assert {system.name for system in BY_NAME.values() if system.where == "process"} == set(rules)
