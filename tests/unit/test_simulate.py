"""The simulator against closed forms, the paper's figures and the Markov model; and what it writes."""

import json
import math
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

import tools.simulate.__main__ as cli
from tests.support.chrome_trace import checked
from tests.support.commands import run
from tests.unit.random_profiles import random_cases
from tokenrouter.speculation import Speculation
from tokenrouter.timeline import chrome
from tools.dtmc.errors import ProfileError, ThresholdError
from tools.dtmc.profile import load_profile, parse_profile
from tools.dtmc.solve import Solution, solve
from tools.simulate.deployment import build_deployment
from tools.simulate.load import Clients, Load
from tools.simulate.loop import EventLoop
from tools.simulate.run import simulate, throughput
from tools.simulate.timeline import draw_timeline

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
R2R_FILE = PROFILES / "r2r_qwen3_0.6b_32b.yaml"
R2R = load_profile(R2R_FILE)
ME = load_profile(PROFILES / "me_qwen3_0.6b_8b_32b.yaml")
P = 0.35
ONE = parse_profile(
    "{models: {only: {step_ms: 10.0}}, entry: only, routing: {only: {only: 1.0}}, commit: {only: {only: 1}}}"
)


def changed(profile, **values):
    """A profile with other fields, checked again."""
    return msgspec.structs.replace(profile, **values)


# --- determinism and conservation ---------------------------------------------------------------------------------


def test_same_seed_same_result_and_another_seed_another():
    def run(seed):
        return simulate(ME, inflight=6, thresholds={"large": 3}, tokens=1500, seed=seed)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_open_loop_is_deterministic_too():
    arguments = {"inflight": 4, "rate": 3.0, "response_tokens": 40, "shape": "geometric", "seconds": 20.0}
    assert simulate(R2R, **arguments) == simulate(R2R, **arguments)


def places(loop):
    """Where every request is, as (place, request)."""
    for lane in loop._lanes:
        if lane.step is not None:
            yield from (("running", request) for request in lane.step.requests)
            started = set(lane.step.requests)
        else:
            started = set()
        # A running step has put its residents among the ready ones already; they are not ready before it ends.
        yield from (("ready", each.request) for each in lane.subserver._runner._waiting if each.request not in started)
        yield from (("travelling", message.request) for _, message in lane.inbox if hasattr(message, "visit"))


@pytest.mark.parametrize("profile", [R2R, ME, changed(ME, handoff_ms=0.5)], ids=["r2r", "me", "handoff"])
def test_at_every_instant_every_request_is_in_exactly_one_place(profile):
    deployment = build_deployment(profile, max_inflight=7, thresholds={"large": 3}, max_queue_delay_ns=None)
    clients = Clients(Load(7, response_tokens=30, shape="geometric"), deployment.policy)
    loop = EventLoop(deployment, clients, inflight=7, handoff_ns=round(profile.handoff_ms * 1e6))
    last_ns = -1
    for _ in range(1500):
        loop.advance()
        assert loop.now_ns > last_ns
        last_ns = loop.now_ns
        found = sorted(request for _, request in places(loop))
        assert found == sorted(loop.orchestrator.keys())
        assert len(found) == 7
    meter, statistics = loop.meter, loop.orchestrator.statistics
    assert meter.tokens == sum(statistics.tokens.values())
    assert meter.finished == statistics.finished["length"] > 30
    assert sum(counts.requests for counts in meter.replicas) == sum(map(sum, meter.moves)) + meter.finished
    assert statistics.stale_messages == statistics.recovered == 0


@pytest.mark.parametrize("handoff_ms", [0.0, 1.0])
def test_time_of_all_requests_is_waits_steps_and_handoffs(handoff_ms):
    steps = []
    profile = changed(ME, handoff_ms=handoff_ms)
    result = simulate(
        profile, inflight=5, thresholds={"medium": 2, "large": 2}, tokens=6000, warmup=0, on_step=steps.append
    )
    served_s = sum(len(step.requests) * (step.end_ns - step.start_ns) for step in steps) * 1e-9
    visits = {name: result.steps[name] * result.mean_batch[name] for name in ME.names}
    waited_s = sum(visits[name] * result.mean_wait_ms[name] for name in ME.names) * 1e-3
    travelled_s = result.handoffs * handoff_ms * 1e-3
    assert served_s + waited_s + travelled_s == pytest.approx(5 * result.simulated_s, rel=0.003)
    assert result.mean_in_flight == 5
    assert result.mean_tpot_ms == pytest.approx(5000 / result.tokens_per_second)


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_one_request_takes_what_its_steps_and_handoffs_take():
    result = simulate(changed(R2R, handoff_ms=0.4), inflight=1, tokens=3000)
    assert result.adjusted_tokens_per_second == pytest.approx(1000 / (6.0 + P * (27.9 + 2 * 0.4)), rel=0.005)
    assert result.mean_wait_ms == {"small": 0, "large": 0}


def test_every_token_extends_every_model_once():
    models = {
        "small": R2R.models["small"],
        "large": msgspec.structs.replace(R2R.models["large"], extend_ms_per_token=2.0),
    }
    result = simulate(changed(R2R, models=models), inflight=1, tokens=3000)
    # The large model takes in every token; one of each visit comes with the step, the others extend it.
    assert result.adjusted_tokens_per_second == pytest.approx(1000 / (6.0 + P * 27.9 + 2.0 * (1 - P)), rel=0.005)


def test_batch_sizes_have_their_own_times():
    models = {"only": msgspec.structs.replace(ONE.models["only"], step_ms={1: 10.0, 3: 14.0})}
    profile = changed(ONE, models=models)
    for n, step_ms in ((1, 10.0), (2, 12.0), (3, 14.0)):
        result = simulate(profile, inflight=n, tokens=600)
        assert result.tokens_per_second == pytest.approx(1000 * n / step_ms)
        assert (result.mean_batch["only"], result.utilisation["only"]) == (n, pytest.approx(1.0))
        assert result.inter_token_ms.p99 == pytest.approx(step_ms)


def test_maximum_batch_splits_the_requests():
    models = {"only": msgspec.structs.replace(ONE.models["only"], max_batch=2)}
    result = simulate(changed(ONE, models=models), inflight=6, tokens=600)
    assert result.mean_batch["only"] == 2
    assert result.mean_wait_ms["only"] == pytest.approx(20.0)


def test_responses_that_end_make_room_for_others():
    result = simulate(ONE, inflight=3, response_tokens=10, tokens=600)
    assert result.tokens_per_second == pytest.approx(300)
    assert result.requests_finished == 60
    assert result.end_to_end_ms.p50 == result.end_to_end_ms.p99 == pytest.approx(100.0)
    assert result.time_to_first_token_ms.mean == pytest.approx(10.0)


def test_geometric_lengths_have_the_given_mean():
    result = simulate(ONE, inflight=8, response_tokens=25, shape="geometric", tokens=12_000)
    assert result.tokens / result.requests_finished == pytest.approx(25, rel=0.1)
    assert result.end_to_end_ms.p50 == pytest.approx(-math.log(2) / math.log(1 - 1 / 25) * 10, rel=0.1)


def test_open_loop_with_one_server_is_the_m_d_1_queue():
    rho, service_ms = 0.6, 10.0
    result = simulate(ONE, inflight=1, rate=rho / service_ms * 1e3, response_tokens=1, tokens=12_000)
    wait_ms = rho / (2 * (1 - rho)) * service_ms
    assert result.end_to_end_ms.mean == pytest.approx(service_ms + wait_ms, rel=0.05)
    assert result.utilisation["only"] == pytest.approx(rho, rel=0.05)
    assert result.tokens_per_second == pytest.approx(60, rel=0.05)


def test_delay_bound_caps_the_wait_for_a_threshold():
    steps = []
    result = simulate(
        ONE, inflight=8, thresholds={"only": 8}, rate=2.0, response_tokens=5, seconds=100.0, max_queue_delay_ms=7.0,
        on_step=steps.append,
    )  # fmt: skip
    assert {step.reason for step in steps} >= {"all_ready"}
    assert result.mean_wait_ms["only"] <= 7.0
    two = simulate(
        R2R, inflight=2, thresholds={"small": 2, "large": 2}, max_queue_delay_ms=3.0, tokens=2000, on_step=steps.append
    )
    assert "deadline" in {step.reason for step in steps}
    # On top of the delay a request waits for the step that runs when it arrives.
    assert two.mean_wait_ms["small"] <= 3.0 + 6.0
    assert two.mean_wait_ms["large"] <= 3.0 + 27.9
    assert two.utilisation["small"] > 0.3


def test_thresholds_may_depend_on_the_number_in_flight():
    def run(n, thresholds):
        return simulate(R2R, inflight=n, thresholds=thresholds, tokens=1000)

    table = {"large": {1: 1, 4: 3}}
    assert run(4, table) == run(4, {"large": 3})
    assert run(3, table) == run(3, {})


# --- the paper and the Markov model -----------------------------------------------------------------------------------

FIGURE_10 = {
    1: [63.4],
    2: [99.0, 110.3],
    3: [142.3, 158.1, 151.9],
    4: [187.2, 195.4, 207.9, 190.7],
    8: [369.2, 370.6, 374.4, 386.8, 399.0, 397.7, 381.1, 332.4],
}


def precise(profile, n, thresholds):
    """A short run, or a long one if the short one says that it is not precise enough for 1 %."""
    result = simulate(profile, inflight=n, thresholds=thresholds, tokens=8000)
    if result.adjusted_standard_error > 0.0045 * result.adjusted_tokens_per_second:
        result = simulate(profile, inflight=n, thresholds=thresholds, tokens=20_000)
    return result


@pytest.mark.parametrize(("n", "large"), [(n, b) for n, row in FIGURE_10.items() for b in range(1, len(row) + 1)])
def test_figure_10(n, large):
    expected = FIGURE_10[n][large - 1]
    result = precise(R2R, n, {"small": 1, "large": large})
    assert result.adjusted_tokens_per_second == pytest.approx(expected, rel=0.01)
    assert abs(result.tokens_per_second - expected) < 4 * result.standard_error


def test_delayed_beats_eager():
    eager, delayed = (precise(R2R, 8, {"large": b}).adjusted_tokens_per_second for b in (1, 5))
    assert delayed / eager == pytest.approx(399.0 / 369.2, rel=0.01)


@pytest.mark.parametrize(
    "case", list(random_cases(30)), ids=lambda case: f"{len(case.thresholds)}-models-{case.inflight}"
)
def test_chain_and_simulation_agree_on_random_profiles(case):
    """Up to the simulator's standard error; with 100,000 tokens each the largest difference of the 30 is 0.32 %."""
    chain = solve(case.profile, case.inflight, case.thresholds)
    for tokens in (8000, 20_000):
        found = simulate(case.profile, inflight=case.inflight, thresholds=case.thresholds, tokens=tokens)
        if found.adjusted_standard_error < 0.005 * found.adjusted_tokens_per_second:
            break
    assert found.adjusted_tokens_per_second == pytest.approx(chain.tokens_per_second, rel=0.015)
    for name in case.profile.names:
        assert found.mean_batch[name] == pytest.approx(chain.mean_batch[name], rel=0.05)
        assert found.utilisation[name] == pytest.approx(chain.utilisation[name], rel=0.08)
        assert found.mean_wait_ms[name] == pytest.approx(chain.mean_wait_ms[name], rel=0.15, abs=0.1)


def test_results_have_the_names_of_the_chain_s():
    common = {field.name for field in fields(Solution)} - {"states"}
    assert common <= asdict(simulate(R2R, inflight=2, tokens=200)).keys()


def test_throughput_without_delayed_batching():
    assert throughput(R2R, 1, {"small": 1, "large": 1}) == pytest.approx(63.4, rel=0.01)


def test_ten_thousand_requests():
    result = simulate(R2R, inflight=10_000, thresholds={"large": 6000}, tokens=15_000)
    assert result.mean_in_flight == 10_000
    assert result.mean_batch["large"] >= 6000


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"thresholds": {"huge": 2}}, ThresholdError, "no model 'huge'; the models are small, large"),
        ({"thresholds": {"small": 2, "large": 4}}, ThresholdError, r"sum of \(B - 1\) is 4"),
        ({"thresholds": {"large": 3}, "rate": 1.0, "response_tokens": 5}, ThresholdError, "set max_queue_delay_ms"),
        ({"rate": 1.0}, ValueError, "give response_tokens"),
        ({"rate": 0.0, "response_tokens": 5}, ValueError, "positive number"),
        ({"response_tokens": 0.5}, ValueError, "response_tokens: 0.5"),
        ({"tokens": 10, "seconds": 1.0}, ValueError, "not both"),
        ({"tokens": 0}, ValueError, "above 0"),
        ({"warmup": -1.0}, ValueError, "warmup: -1"),
        ({"max_queue_delay_ms": -1.0}, ValueError, "max_queue_delay_ms: -1"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        simulate(R2R, inflight=4, **arguments)


def test_deadlock_is_told():
    tables = {"small": {1: 1, 4: 4}, "large": {1: 1, 4: 4}}
    with pytest.raises(ThresholdError, match="deadlock after"):
        simulate(R2R, inflight=4, thresholds=tables)


def test_commits_of_a_fraction_of_a_token_are_refused():
    with pytest.raises(ProfileError, match=r"commit\.large\.small: 0\.5"):
        simulate(changed(R2R, commit={"small": {"small": 1}, "large": {"small": 0.5}}), inflight=1)


# --- files and command line -------------------------------------------------------------------------------------------


def recorded(tokens=300, **arguments):
    steps = []
    simulate(R2R, inflight=4, thresholds={"large": 3}, tokens=tokens, warmup=0, on_step=steps.append, **arguments)
    return steps


def test_steps_of_a_model_never_overlap():
    for name in R2R.names:
        lane = [step for step in recorded() if step.model == name]
        assert len(lane) > 20
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(lane))


@pytest.mark.parametrize("speculation", [None, Speculation(4)])
def test_a_recording_is_that_of_a_server(speculation):
    found = []
    steps = []
    simulate(R2R, inflight=4, thresholds={"large": 3}, tokens=400, warmup=0, speculation=speculation, agreement=0.7,
             response_tokens=50, on_step=steps.append, on_recording=found.extend)  # fmt: skip
    assert [each.about.model for each in found] == ["simulator", *R2R.names]
    told = {(each.about.model, step.start_ns, step.end_ns, len(step.members), step.reason)
            for each in found for step in each.steps}  # fmt: skip
    assert told == {(step.model, step.start_ns, step.end_ns, len(step.requests), step.reason) for step in steps}
    events = checked(chrome.document(found))
    drawn = [event for event in events if event["ph"] == "X" and event["pid"] == chrome.MODELS]
    assert sorted((e["ts"], e["dur"], e["args"]["batch"]) for e in drawn) == [
        (s.start_ns // 1000, s.end_ns // 1000 - s.start_ns // 1000, len(s.requests))
        for s in sorted(steps, key=lambda s: (s.start_ns, s.end_ns))
    ]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"small", "large", "request 1", "request 4"} <= named
    assert ("request 1, ahead" in named) == (speculation is not None)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_timeline_is_drawn(tmp_path, suffix):
    path = tmp_path / f"timeline.{suffix}"
    draw_timeline(recorded()[-40:], R2R.names, path, title="four in flight")
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def invoke(*arguments):
    return run(cli.main, "--profile", R2R_FILE, "--inflight", 4, *arguments)


def test_command_line_json_and_files(tmp_path):
    picture, trace = tmp_path / "out.png", tmp_path / "out.json"
    run = invoke("--thresholds", "small=1,large=3", "--tokens", "500", "--seed", "7", "--json",
                 "--timeline", str(picture), "--trace", str(trace))  # fmt: skip
    assert run.exit_code == 0, run.output
    expected = simulate(R2R, inflight=4, thresholds={"small": 1, "large": 3}, tokens=500, seed=7)
    assert json.loads(run.stdout) == json.loads(json.dumps(asdict(expected)))
    assert picture.read_bytes()
    assert json.loads(trace.read_text())["traceEvents"]


def test_command_line_table_and_errors():
    run = invoke("--tokens", "500", "--response-tokens", "20")
    assert run.exit_code == 0
    assert "tokens/s" in run.stdout
    assert "end to end" in run.stdout
    for wrong in ("large", "large=x", "large=2,large=3"):
        assert invoke("--thresholds", wrong).exit_code == 2
    assert invoke("--thresholds", "large=9").exit_code == 2


def test_time_between_a_response_and_the_next_request() -> None:
    # One client, one model: a cycle is the response's steps and the think time, in closed form.
    step_ms = ONE.models["only"].step_time_ms(1)
    result = simulate(ONE, inflight=1, response_tokens=5, think_ms=3.0, tokens=500)
    assert result.tokens_per_second == pytest.approx(5e3 / (5 * step_ms + 3.0), rel=0.02)


# --- speculative hand-off --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("agreement", "least", "most"), [(0.0, 0.9, 1.3), (0.7, 1.6, 2.1), (1.0, 2.2, 3.6)])
def test_going_ahead_pays_by_agreement(agreement, least, most):
    """Against the best plain thresholds at 16 in flight, 785.4 tokens/s by the exact chain."""
    result = simulate(
        R2R, inflight=16, thresholds={"large": 4}, tokens=2000, speculation=Speculation(8), agreement=agreement
    )
    assert least < result.tokens_per_second / 785.4 < most
    # Each token by the large model is a hand-off there and back, as in plain routing.
    assert result.handoffs / result.tokens == pytest.approx(2 * P, abs=0.08)


def test_speculation_needs_a_profile_that_allows_it():
    with pytest.raises(ProfileError, match="speculation: takes two models"):
        simulate(ME, inflight=2, tokens=10, speculation=Speculation(8))
    with pytest.raises(ValueError, match=r"agreement: 1\.5"):
        simulate(R2R, inflight=2, tokens=10, speculation=Speculation(8), agreement=1.5)
