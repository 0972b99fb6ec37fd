"""Settings of speculative hand-off that are found by simulation: feasible, and worth what simulating them says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import commands
from tokenrouter.speculation import Speculation
from tools.dtmc.cli import app
from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import load_profile, parse_profile
from tools.dtmc.search import search
from tools.simulate.run import simulate
from tools.simulate.search import search_speculation, search_speculation_table

FILE = Path(__file__).parents[2] / "configs" / "profiles" / "r2r_qwen3_0.6b_32b.yaml"
R2R = load_profile(FILE)


def test_the_best_settings_are_feasible_and_as_fast_as_simulated_again() -> None:
    found = search_speculation(R2R, 4, 0.7, depths=(8,))
    assert sum(b - 1 for b in found.thresholds.values()) < 4
    again = simulate(
        R2R, inflight=4, thresholds=found.thresholds, speculation=Speculation(8), agreement=0.7, tokens=6000, seed=99
    )
    assert found.tokens_per_second == pytest.approx(again.tokens_per_second, rel=0.1)
    assert found.plain_tokens_per_second == search(R2R, 4).tokens_per_second
    assert found.pays
    assert 1.5 < found.ratio < 2.2


def test_it_does_not_pay_where_nothing_agrees() -> None:
    assert not search_speculation(R2R, 2, 0.0, depths=(8,)).pays


def test_a_table_has_one_depth() -> None:
    table = search_speculation_table(R2R, 3, 0.9, depths=(1, 4))
    assert [row.inflight for row in table] == [1, 2, 3]
    assert {row.depth for row in table} == {4}  # with depth 1 the small model stands still as before


def test_a_profile_that_keeps_the_token_cannot_go_ahead() -> None:
    keeps = parse_profile(
        """
        models: {small: {step_ms: 6.0}, large: {step_ms: 27.9}}
        entry: small
        routing: {small: {small: 0.65, large: 0.35}, large: {small: 1.0}}
        commit: {small: {small: 1, large: 1}, large: {small: 1}}
        """
    )
    with pytest.raises(ProfileError, match="speculation"):
        search_speculation(keeps, 2, 0.7)


def test_the_command_prints_json_and_a_table() -> None:
    arguments = ["search", "--profile", FILE, "--inflight", "2", "--speculation", "--agreement", "0.9", "--depth", "4"]
    printed = json.loads(commands.run(app, *arguments, "--json").stdout)
    assert printed["depth"] == 4
    assert printed["pays"]
    assert "4" in commands.run(app, *arguments).stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--speculation"], "give --agreement"), (["--agreement", "0.5"], "only with --speculation")],
)
def test_options_that_do_not_fit_are_refused(options: list[str], complaint: str) -> None:
    result = commands.run(app, "search", "--profile", FILE, "--inflight", "2", *options)
    assert result.exit_code == 2
    assert complaint in result.stderr
