"""The profile format: what it accepts, what it computes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.dtmc.errors import ProfileError
from tools.dtmc.network import build_network
from tools.dtmc.profile import dump_profile, load_profile, parse_profile

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
GOOD = """
models:
  small: {step_ms: 6}
  large: {step_ms: {1: 20.0, 3: 24.0, 5: 30.0}, extend_ms_per_token: 0.5, max_batch: 8}
entry: small
routing: {small: {small: 0.65, large: 0.35}, large: {small: 1}}
commit: {small: {small: 1}, large: {small: 1}}
handoff_ms: 0
"""


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_profiles_load_and_round_trip(path: Path) -> None:
    profile = load_profile(path)
    assert parse_profile(dump_profile(profile)) == profile


def test_a_profile_asks_the_rule_for_step_times_and_adds_extended_tokens() -> None:
    profile = parse_profile(GOOD)
    assert profile.models["small"].step_time_ms(100) == 6.0
    assert profile.models["large"].step_time_ms(7) == pytest.approx(36.0)
    assert profile.models["large"].step_time_ms(3, 4) == pytest.approx(26.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("large: 0.35", "large: 0.3", "routing.small: probabilities sum to 0.95; make them", id="row-sum"),
        pytest.param("large: 0.35", "large: -0.35", "routing.small.large: -0.35; give a number of 0", id="negative-p"),
        pytest.param("step_ms: 6", "step_ms: -6", "models.small.step_ms: -6; give a positive", id="negative-time"),
        pytest.param("step_ms: 6", "step_ms: .nan", "models.small.step_ms: nan; give a positive", id="nan"),
        pytest.param("step_ms: 6", "step_ms: {}", "models.small.step_ms: empty table", id="empty-table"),
        pytest.param("step_ms: 6", "step_ms: fast", "got `str` - at `\\$.models", id="type"),
        pytest.param("{1: 20.0", "{0: 20.0", "Expected `int` >= 1", id="batch-of-zero"),
        pytest.param("max_batch: 8", "max_batch: 0", "Expected `int` >= 1", id="max-batch"),
        pytest.param("max_batch: 8", "max_bach: 8", "unknown field `max_bach`", id="unknown-key"),
        pytest.param("entry: small", "entry: tiny", "entry: no model 'tiny'; the models are small, large", id="entry"),
        pytest.param("large: 0.35", "lrge: 0.35", "routing.small: no model 'lrge'", id="unknown-target"),
        pytest.param(", large: {small: 1}}\ncommit", "}\ncommit", "routing.large: missing", id="row-missing"),
        pytest.param("commit: {small: {small: 1}, large: {small: 1}}", "commit: {}", "commit: no move", id="no-tokens"),
        pytest.param("handoff_ms: 0", "handoff_ms: -1", "handoff_ms: -1; give a number of 0", id="handoff"),
        pytest.param("handoff_ms: 0", "delta_ms: 0", "delta_ms: 0; give a positive", id="delta"),
        pytest.param("models:", "models: [", "not valid YAML", id="yaml"),
    ],
)
def test_a_wrong_field_is_named_with_the_remedy(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ProfileError, match=message):
        parse_profile(GOOD.replace(old, new, 1))


def test_routing_that_traps_requests_in_separate_groups_is_refused() -> None:
    text = GOOD.replace(
        "routing: {small: {small: 0.65, large: 0.35}, large: {small: 1}}",
        "routing: {small: {large: 0.5, third: 0.5}, large: {large: 1}, third: {third: 1}}",
    ).replace("  large: {step", "  third: {step_ms: 1}\n  large: {step")
    with pytest.raises(ProfileError, match="separate groups"):
        parse_profile(text)


def test_a_probability_may_be_written_as_1e_5_and_no_key_twice() -> None:
    text = GOOD.replace("small: 0.65, large: 0.35", "small: 0.99999, large: 1e-5")
    assert parse_profile(text).routing["small"]["large"] == 1e-5
    with pytest.raises(ProfileError, match=r"not valid YAML: the key 'large' stands twice"):
        parse_profile(text.replace("large: 1e-5", "large: 1e-5, large: 1e-5"))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere\.yaml: No such file"):
        load_profile(tmp_path / "nowhere.yaml")


def test_times_that_vanish_on_the_grid_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"models\.small\.step_ms: 6 ms vanishes on a grid of 50 ms; lower delta_ms"):
        build_network(parse_profile(GOOD + "delta_ms: 50\n"), 2)


def test_a_handoff_longer_than_the_shortest_step_is_refused() -> None:
    with pytest.raises(ProfileError, match="handoff_ms: 7 ms is longer than the shortest step"):
        build_network(parse_profile(GOOD.replace("handoff_ms: 0", "handoff_ms: 7")), 2)
