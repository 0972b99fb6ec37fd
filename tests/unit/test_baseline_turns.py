from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.baselines.limits import best_thresholds, no_wait, throughput
from perf.baselines.turns import RULES, Rule, Thresholds, in_turn, most_requests, step_sync
from tools.dtmc.profile import Profile, load_profile
from tools.dtmc.search import search

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"
R2R = load_profile(PROFILES / "r2r_qwen3_0.6b_32b.yaml")
ME = load_profile(PROFILES / "me_qwen3_0.6b_8b_32b.yaml")

counts_of_three = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


@pytest.mark.parametrize("rule", [*RULES.values(), Thresholds((1, 2, 3))])
@given(counts=counts_of_three, last=st.integers(0, 2))
def test_a_rule_names_models_that_have_requests(rule: Rule, counts: list[int], last: int) -> None:
    chosen = rule(counts, last)
    assert chosen
    assert all(counts[model] > 0 for model in chosen)
    assert list(chosen) == sorted(set(chosen))


def test_what_each_rule_does() -> None:
    assert in_turn([2, 1, 3], 0) == (1,)
    assert in_turn([2, 0, 3], 0) == (2,)
    assert in_turn([2, 0, 3], 2) == (0,)
    assert in_turn([2, 0, 0], 0) == (0,)
    assert step_sync([2, 0, 3], 0) == (0, 2)
    assert most_requests([2, 0, 3], 0) == (2,)
    assert most_requests([2, 2, 0], 0) == (1,)
    assert Thresholds((1, 2))([3, 2], 0) == (1,)
    assert Thresholds((1, 3))([2, 2], 0) == (0,)
    assert Thresholds((1, 3))([0, 2], 0) == (1,)


def test_one_request_takes_the_same_time_under_every_rule() -> None:
    """Nobody waits: 6.0 + 0.35 * 27.9 ms per token."""
    expected = 1e3 / (6.0 + 0.35 * 27.9)
    for rule in (*RULES.values(), Thresholds((1, 1))):
        assert throughput(R2R, 1, rule) == pytest.approx(expected)


def test_official_lock_step_in_closed_form() -> None:
    """Every round each request commits one token: a small step, and a large one if any of the four needs it."""
    round_ms = 6.0 + 27.9 * (1.0 - 0.65**4)
    assert throughput(R2R, 4, in_turn) == pytest.approx(4e3 / round_ms)


def test_step_sync_in_closed_form() -> None:
    """Requests move each round, independently, so each is at the large model with p / (1 + p)."""
    large = 0.35 / 1.35
    idle = (1.0 - large) ** 4
    round_ms = 6.0 * idle + 27.9 * (1.0 - idle)
    assert throughput(R2R, 4, step_sync) == pytest.approx(4e3 * (1.0 - large) / round_ms)


@pytest.mark.parametrize("profile", [R2R, ME])
def test_delayed_batching_is_ahead_of_every_synchronous_rule_at_four(profile: Profile) -> None:
    ours = search(profile, 4).tokens_per_second
    best, rule = best_thresholds(profile, 4)
    assert best == max(throughput(profile, 4, Thresholds((1, *rule.thresholds[1:]))), best)
    assert ours > best > throughput(profile, 4, most_requests)
    assert ours > throughput(profile, 4, in_turn)
    assert ours < no_wait(profile, 4)


def test_no_schedule_is_twice_as_fast_as_lock_step_for_r2r() -> None:
    """So a factor of two over a lock-step without overhead cannot be reached at these step times."""
    assert no_wait(R2R, 4) < 2.0 * throughput(R2R, 4, in_turn)
