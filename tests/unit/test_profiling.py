"""The profiler's arithmetic, on synthetic metrics."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from tokenrouter.metrics_page import Scrape
from tokenrouter.statistics import END, MOST_FITTED_EXTENDED, StepTimes
from tools.dtmc.errors import ProfileError
from tools.dtmc.solve import solve
from tools.profile.__main__ import look, profile_text
from tools.profile.measured import evaluate
from tools.profile.steps import MIN_STEPS, fit, read_sums

Sample = tuple[str, dict[str, str], float]
NOTHING = Scrape({})


def page(*samples: Sample) -> Scrape:
    return Scrape({(name, frozenset(labels.items())): value for name, labels, value in samples})


def step_samples(model: str, steps: Sequence[tuple[int, int, float]]) -> list[Sample]:
    """What a subserver publishes after steps of (batch, extended tokens, seconds)."""
    times = StepTimes()
    for batch, extended, seconds in steps:
        times.observe(batch, extended, seconds)
    samples: list[Sample] = [("tokenrouter_steps", {"model": model}, len(steps))]
    for batch, sums in times.by_batch.items():
        labels = {"model": model, "batch": str(batch)}
        samples += [
            ("tokenrouter_batch_steps", labels, sums.steps),
            ("tokenrouter_batch_step_seconds", labels, sums.seconds),
            ("tokenrouter_batch_extended_tokens", labels, sums.extended),
        ]
    return [
        *samples,
        ("tokenrouter_step_seconds_squared", {"model": model}, times.seconds_squared),
        ("tokenrouter_step_extended_squared", {"model": model}, times.extended_squared),
        ("tokenrouter_step_seconds_extended", {"model": model}, times.seconds_extended),
        ("tokenrouter_max_batch", {"model": model}, 16),
    ]


def route(model: str, target: str, committed: int, count: float) -> Sample:
    return "tokenrouter_routes", {"model": model, "target": target, "committed": str(committed)}, count


def r2r(*, large_routes: bool = True) -> Scrape:
    """The R2R figures of the paper, with a hand-off of 0.3 ms."""
    samples = step_samples("small", [(1, 0, 0.006)] * 20 + [(2, 0, 0.0065)] * 20)
    samples += step_samples("large", [(1, 0, 0.0279)] * 20 + [(4, 2, 0.0283)] * 20)
    samples += [route("small", "small", 1, 640), route("small", "large", 0, 350), route("small", END, 1, 10)]
    if large_routes:
        samples.append(route("large", "small", 1, 350))
    samples += [
        ("tokenrouter_visits", {"model": "small"}, 360),
        ("tokenrouter_handoffs_in", {"model": "small"}, 350),
        ("tokenrouter_visits", {"model": "large"}, 350),
        ("tokenrouter_handoffs_in", {"model": "large"}, 350),
        ("tokenrouter_handoff_seconds_count", {"model": "small"}, 200),
        ("tokenrouter_handoff_seconds_sum", {"model": "small"}, 0.06),
    ]
    return page(*samples)


def test_the_fit_finds_base_and_slope_again() -> None:
    draw = random.Random(1)
    base = {1: 0.006, 2: 0.0065, 4: 0.008}
    steps = [(b, e, base[b] + 2e-5 * e) for b in base for e in (draw.randint(0, 40) for _ in range(30))]
    found = fit(read_sums(page(*step_samples("m", steps)), "m"))
    assert found.step_ms == pytest.approx({batch: 1e3 * seconds for batch, seconds in base.items()})
    assert found.extend_ms_per_token == pytest.approx(0.02)
    assert found.slope_error_ms == pytest.approx(0.0, abs=1e-5)
    assert found.steps == {1: 30, 2: 30, 4: 30}


def test_the_slope_agrees_with_numpy_on_noisy_steps() -> None:
    np = pytest.importorskip("numpy")
    draw = random.Random(2)
    steps = [(b, e := draw.randint(0, 20), 0.01 + 1e-4 * e + draw.gauss(0, 5e-4)) for b in (1, 3) for _ in range(80)]
    found = fit(read_sums(page(*step_samples("m", steps)), "m"))
    design = np.array([[b == 1, b == 3, e] for b, e, _ in steps], dtype=float)
    want, rss, *_ = np.linalg.lstsq(design, np.array([t for *_, t in steps]), rcond=None)
    error = math.sqrt(rss[0] / (len(steps) - 3) * np.linalg.inv(design.T @ design)[2, 2])
    assert found.extend_ms_per_token == pytest.approx(1e3 * want[2])
    assert found.slope_error_ms == pytest.approx(1e3 * error)
    assert found.step_ms[3] == pytest.approx(1e3 * want[1])


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(1, 3, 0.01 + 0.001 * (i % 2)) for i in range(50)], id="every-step-extends-alike"),
        pytest.param([(1, i % 2, 0.01 + 0.005 * (i % 3)) for i in range(30)], id="noise-hides-it"),
        pytest.param([(1, i % 2, 0.01 - 0.001 * (i % 2)) for i in range(30)], id="negative"),
        pytest.param([(1, 0, 0.01)], id="one-step"),
    ],
)
def test_a_slope_that_cannot_be_told_from_0_is_0(steps: list[tuple[int, int, float]]) -> None:
    found = fit(read_sums(page(*step_samples("m", steps)), "m"))
    assert found.extend_ms_per_token == 0.0
    assert found.step_ms[1] == pytest.approx(1e3 * sum(t for *_, t in steps) / len(steps))


def test_rare_batch_sizes_are_left_out_and_named() -> None:
    steps = [(1, 0, 0.01)] * MIN_STEPS + [(2, 0, 0.02)] * (MIN_STEPS - 1)
    found = fit(read_sums(page(*step_samples("m", steps)), "m"))
    assert found.steps == {1: MIN_STEPS}
    assert found.left_out == {2: MIN_STEPS - 1}


def test_the_profile_is_what_was_measured_and_the_tuner_takes_it() -> None:
    text, profile = profile_text(NOTHING, r2r(), "test")
    assert profile.names == ("small", "large")
    assert profile.entry == "small"
    assert profile.routing == {"small": {"small": 0.65, "large": 0.35}, "large": {"small": 1.0}}
    assert profile.commit == {"small": {"small": 1.0, "large": 0.0}, "large": {"small": 1.0}}
    assert profile.models["small"].step_ms == {1: 6.0, 2: 6.5}
    assert profile.models["large"].max_batch == 16
    assert profile.handoff_ms == pytest.approx(0.3)
    assert profile.delta_ms == pytest.approx(0.3)
    assert solve(profile, 2, {"small": 1, "large": 2}).tokens_per_second > 90
    for evidence in ("# 20 steps", "# 1000 moves", "# 10 of 10 responses", "mean of 200 hand-offs"):
        assert evidence in text


def test_only_the_window_counts() -> None:
    before = r2r()
    after = Scrape({key: 3.0 * value for key, value in before.samples.items()})
    after.samples["tokenrouter_max_batch", frozenset({("model", "small")})] = 16.0
    after.samples["tokenrouter_max_batch", frozenset({("model", "large")})] = 16.0
    measured = evaluate(before, after, "test")
    assert measured.steps["small"].steps == {1: 40, 2: 40}
    assert measured.max_batch == {"small": 16, "large": 16}


def test_probabilities_sum_to_one_after_rounding() -> None:
    samples = step_samples("a", [(1, 0, 0.01)] * 20) + step_samples("b", [(1, 0, 0.01)] * 20)
    samples += step_samples("c", [(1, 0, 0.01)] * 20)
    samples += [route(m, target, 1, 1) for m in "abc" for target in "abc"]
    _, profile = profile_text(NOTHING, page(*samples), "test")
    assert all(sum(row.values()) == pytest.approx(1.0, abs=1e-9) for row in profile.routing.values())


def test_odd_model_names_survive() -> None:
    samples = [*step_samples("yes", [(1, 0, 0.01)] * 20), route("yes", "yes", 1, 20)]
    _, profile = profile_text(NOTHING, page(*samples), "test")
    assert profile.names == ("yes",)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        pytest.param(NOTHING, "no model made a step; send requests meanwhile", id="no-traffic"),
        pytest.param(r2r(large_routes=False), "large made steps, but no request went on", id="too-short"),
    ],
)
def test_too_little_traffic_is_a_clear_error(after: Scrape, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        profile_text(NOTHING, after, "test")


def test_prefills_do_not_enter_the_fit() -> None:
    steps = [(1, 0, 0.01)] * 20 + [(1, MOST_FITTED_EXTENDED + 1, 9.0)]
    assert fit(read_sums(page(*step_samples("m", steps)), "m")).step_ms == pytest.approx({1: 10.0})


def test_no_server_is_a_clear_error() -> None:
    with pytest.raises(ProfileError, match="give the URL of a running server"):
        look("http://127.0.0.1:9/metrics")
