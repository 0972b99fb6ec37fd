"""What the tuner reads of a repository, and where it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.emulated.repository import write_emulated_repository
from tokenrouter.metrics_page import TAKEN, Scrape
from tokenrouter.speculation import Speculation
from tools.build_repository.build import built_deployment
from tools.build_repository.spec import BatchingSpec
from tools.build_repository.tuning import kept, plan_edits, undone, write_edits
from tools.dtmc.profile import parse_profile
from tools.progress import silent
from tools.tune.__main__ import Row, table_of
from tools.tune.candidates import candidates
from tools.tune.measure import measured_agreement, predicted, rate, read_thresholds, working_copy

PROFILE = parse_profile(
    """
    models: {small: {step_ms: 6.0}, large: {step_ms: 27.9}}
    entry: small
    routing: {small: {small: 0.65, large: 0.35}, large: {small: 1.0}}
    commit: {small: {small: 1}, large: {small: 1}}
    """
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_emulated_repository(
        tmp_path / "repository", step_ms={"small": 1.0, "large": 2.0}, entry={"policy": "random"}
    )


def test_the_entry_and_its_models_are_found(repository: Path) -> None:
    found = read_thresholds(repository)
    assert found.entry == "tokenrouter"
    assert list(found.batching) == ["small", "large"]
    assert found.at(8, ["small", "large"]) == {"small": 1, "large": 1}


def test_applied_thresholds_are_read_back(repository: Path) -> None:
    found = {"large": BatchingSpec(5, 70_000, {1: 1, 2: 2, 8: 5})}
    write_edits(plan_edits(repository, found).values())
    read = read_thresholds(repository)
    assert [read.at(n, ["large"])["large"] for n in (1, 2, 7, 8)] == [1, 2, 2, 5]


def test_the_copy_goes_away_and_the_repository_stays_as_it_was(repository: Path) -> None:
    before = (repository / "large" / "config.pbtxt").read_text()
    with working_copy(repository, in_place=False) as folder:
        assert folder != repository
        (folder / "large" / "config.pbtxt").write_text("changed")
    assert not folder.exists()
    assert (repository / "large" / "config.pbtxt").read_text() == before
    with working_copy(repository, in_place=True) as folder:
        assert folder == repository


def test_the_rate_is_by_the_time_at_which_the_numbers_were_taken() -> None:
    def page(tokens: float, taken_s: float, other_s: float) -> Scrape:
        return Scrape(
            {
                ("tokenrouter_tokens", frozenset({("model", "a"), ("writer", "small")})): tokens,
                ("tokenrouter_tokens", frozenset({("model", "a"), ("writer", "large")})): tokens,
                (TAKEN, frozenset({("model", "a")})): taken_s,
                (TAKEN, frozenset({("model", "small")})): other_s,
            }
        )

    assert rate(page(10, 100.0, 7.0), page(60, 104.0, 9.0), "a") == 25.0


def test_the_prediction_is_left_out_where_thresholds_would_deadlock() -> None:
    assert predicted(PROFILE, 4, {"small": 1, "large": 3}) == pytest.approx(207.95, abs=0.01)
    assert predicted(PROFILE, 2, {"small": 1, "large": 3}) is None


def test_the_table_has_a_line_per_number_in_flight() -> None:
    rows = [
        Row(1, ({"small": 1, "large": 1}, {"small": 1, "large": 1}), (60.0, 60.0), (63.4, 63.4)),
        Row(4, ({"small": 1, "large": 1}, {"small": 1, "large": 3}), (180.0, 200.0), (None, 208.0)),
    ]
    assert table_of(rows).row_count == 2


def test_agreement_is_believed_from_enough_tokens_on() -> None:
    def page(compared: float, agreed: float) -> Scrape:
        labels = frozenset({("model", "a"), ("policy", "random")})
        return Scrape(
            {("tokenrouter_discarded_tokens", labels): compared, ("tokenrouter_agreed_tokens", labels): agreed}
        )

    assert measured_agreement(page(1000, 700), "a") == 0.7
    assert measured_agreement(page(10, 7), "a") is None
    assert measured_agreement(page(1000, 700), "other") is None


@pytest.mark.parametrize(("agreement", "kinds"), [(0.9, 2), (0.0, 1), (None, 1)])
def test_speculation_is_a_candidate_where_it_pays(repository: Path, agreement: float | None, kinds: int) -> None:
    found = list(candidates(repository, PROFILE, 2, agreement, silent))
    assert [settings.speculation is not None for settings in found] == [False, True][:kinds]
    assert all(set(settings.batching) == {"small", "large"} for settings in found)
    assert set(found[-1].ahead) == ({1, 2} if kinds == 2 else set())


def test_speculation_is_no_candidate_for_a_policy_that_cannot(tmp_path: Path) -> None:
    entry = {"policy": "me", "policy_params": {"weights": {"small": 0.5, "large": 0.5}}}
    folder = write_emulated_repository(tmp_path / "me", step_ms={"small": 1.0, "large": 2.0}, entry=entry)
    assert [settings.speculation for settings in candidates(folder, PROFILE, 2, 0.9, silent)] == [None]


def test_speculation_that_was_tuned_is_written_and_survives_a_rebuild(repository: Path) -> None:
    fresh = built_deployment(repository)
    write_edits(plan_edits(repository, {"large": BatchingSpec(2)}, Speculation(4)).values())
    assert '"depth":4' in (repository / "tokenrouter" / "config.pbtxt").read_text().replace("\\", "")
    old = built_deployment(repository)
    assert old.tuned == ("large", "tokenrouter")
    assert undone(old, fresh) == ["large", "tokenrouter"]
    assert kept(old, fresh) == old
