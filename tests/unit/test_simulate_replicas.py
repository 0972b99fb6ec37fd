"""Replicas and KV limits in the simulator, against what is known without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import tools.simulate.__main__ as cli
from tests.support.commands import run
from tools.dtmc.cli import app
from tools.dtmc.errors import ThresholdError
from tools.dtmc.profile import Profile, load_profile, parse_profile
from tools.dtmc.solve import solve
from tools.simulate.deployment import build_deployment
from tools.simulate.load import Clients, Load
from tools.simulate.loop import EventLoop
from tools.simulate.ratio import ratios
from tools.simulate.run import simulate

FILE = Path(__file__).parents[2] / "configs" / "profiles" / "r2r_qwen3_0.6b_32b.yaml"
R2R = load_profile(FILE)
ONE = parse_profile(
    "{models: {only: {step_ms: 10.0}}, entry: only, routing: {only: {only: 1.0}}, commit: {only: {only: 1}}}"
)


def with_models(profile: Profile, **fields: Any) -> Profile:
    """The profile with other fields of every model."""
    models = {name: msgspec.structs.replace(model, **fields) for name, model in profile.models.items()}
    return msgspec.structs.replace(profile, models=models)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_replicas_of_one_model_are_so_many_times_one(count: int) -> None:
    """Step times that grow with the batch, so that it matters how requests are dealt out: evenly."""
    profile = with_models(ONE, step_ms={1: 10.0, 4: 40.0})
    result = simulate(profile, inflight=2 * count, replicas={"only": count}, tokens=600)
    alone = simulate(profile, inflight=2, tokens=600)
    assert result.tokens_per_second == pytest.approx(count * alone.tokens_per_second)
    assert result.mean_batch == {"only": 2.0}
    assert result.utilisation["only"] == pytest.approx(1.0)
    assert result.mean_tpot_ms == pytest.approx(20.0)


def test_as_many_replicas_of_both_models_are_so_many_deployments() -> None:
    """Pinned to the first small and the first large model, and so on: the Markov model of each pair is exact."""
    thresholds = {"small": 1, "large": 2}
    result = simulate(R2R, inflight=12, thresholds=thresholds, replicas={"small": 3, "large": 3}, tokens=12_000)
    exact = solve(R2R, 4, thresholds).tokens_per_second
    assert abs(result.adjusted_tokens_per_second - 3 * exact) < 4 * result.adjusted_standard_error + 0.01 * exact


def test_a_threshold_is_looked_up_by_the_requests_of_its_replica() -> None:
    """A table with 3 from 3 in flight on: 9 requests on 3 replicas are 3 each, so every batch has 3."""
    table = {"only": {1: 1, 3: 3, 4: 4}}
    result = simulate(ONE, inflight=9, thresholds=table, replicas={"only": 3}, tokens=600)
    assert result.mean_batch == {"only": 3.0}
    with pytest.raises(ThresholdError, match="deadlock"):
        simulate(ONE, inflight=9, thresholds={"only": 4}, replicas={"only": 3}, tokens=600)


def test_kv_bounds_how_many_run_at_once() -> None:
    """Each request takes 2 + 8 tokens: two fit on a replica of 25, whatever `inflight` allows."""
    profile = with_models(ONE, kv_tokens=25)
    result = simulate(
        profile, inflight=100, rate=500.0, response_tokens=8, prompt_tokens=2, replicas={"only": 3}, tokens=2000
    )
    assert result.peak_in_flight == 6
    assert result.mean_batch == {"only": 2.0}
    # Two rows each 10 ms, of three replicas.
    assert result.tokens_per_second == pytest.approx(600.0, rel=0.01)


@pytest.mark.parametrize("handoff_ms", [0.0, 0.5])
def test_at_every_instant_the_number_in_flight_is_that_of_all_pins(handoff_ms: float) -> None:
    deployment = build_deployment(
        R2R, max_inflight=9, thresholds={"large": {1: 1, 4: 2}}, max_queue_delay_ns=None, replicas={"large": 3}
    )
    clients = Clients(Load(9, response_tokens=20, shape="geometric"), deployment.policy)
    loop = EventLoop(deployment, clients, inflight=9, handoff_ns=round(handoff_ms * 1e6))
    for _ in range(800):
        loop.advance()
        orchestrator = loop.orchestrator
        assert orchestrator.pinned("small") == sum(map(orchestrator.pinned, ("large", "large_1", "large_2"))) == 9
    assert loop.meter.finished > 10
    assert sum(map(sum, loop.meter.moves)) + loop.meter.finished == sum(each.requests for each in loop.meter.replicas)
    assert all(counts.steps > 10 for counts in loop.meter.replicas)


def test_more_replicas_are_faster_where_a_batch_costs_something() -> None:
    profile = with_models(R2R, step_ms={1: 10.0, 12: 60.0})
    one, two, four = (simulate(profile, inflight=12, replicas={"large": count}, tokens=3000) for count in (1, 2, 4))
    assert one.tokens_per_second < two.tokens_per_second < four.tokens_per_second


def test_the_command(tmp_path: Path) -> None:
    picture = tmp_path / "steps.png"
    options = ("--profile", FILE, "--inflight", "6", "--replicas", "large=2", "--tokens", "300")
    result = run(cli.main, *options, "--timeline", picture)
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 1000
    for given, problem in (
        ("large=0", "replicas of 'large': 0; give 1 or more"),
        ("huge=1", "replicas: no model 'huge'; the models are small, large"),
        ("large", "--replicas: 'large' is not MODEL=NUMBER"),
    ):
        refused = run(cli.main, "--profile", FILE, "--inflight", "6", "--replicas", given)
        assert refused.exit_code == 2
        assert problem in " ".join(refused.output.split())


def test_which_ratio_pays() -> None:
    """Exact where both models have as many replicas, and by simulation within its error of the same numbers there."""
    prices = {"small": 1.0, "large": 4.0}
    found = {
        tuple(each.replicas.values()): each for each in ratios(R2R, 8, {"small": 2, "large": 2}, prices, tokens=4000)
    }
    assert set(found) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert found[1, 1].tokens_per_second == solve(R2R, 8, {"small": 1, "large": 1}).tokens_per_second
    assert found[2, 2].tokens_per_second == 2 * solve(R2R, 4, {"small": 1, "large": 1}).tokens_per_second
    assert found[1, 1].standard_error == found[2, 2].standard_error == 0.0
    assert found[2, 1].standard_error > 0.0
    assert {key: each.cost for key, each in found.items()} == {(1, 1): 5.0, (1, 2): 9.0, (2, 1): 6.0, (2, 2): 10.0}
    listed = [each.tokens_per_cost for each in found.values()]
    assert listed == sorted(listed, reverse=True)
    assert found[1, 1].tokens_per_cost == pytest.approx(3600 * found[1, 1].tokens_per_second / 5.0)


def test_the_command_that_says_which_ratio_pays(tmp_path: Path) -> None:
    arguments = ["ratio", "--profile", str(FILE), "--inflight", "4", "--most"]
    result = CliRunner().invoke(app, [*arguments, "small=1,large=2", "--json"])
    assert result.exit_code == 0, result.output
    assert [each["replicas"]["large"] for each in json.loads(result.stdout)] == [1, 2]
    for most, problem in (("huge=2", "--most: no model 'huge'"), ("large=0", "--most: large=0; give 1 or more")):
        refused = CliRunner().invoke(app, [*arguments, most])
        assert refused.exit_code == 2
        assert problem in refused.output
