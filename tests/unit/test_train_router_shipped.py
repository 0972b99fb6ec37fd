"""The routers that come with the demo pair: they load, fit the pair, are small, and are found without being named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.policy_harness import make
from tokenrouter.errors import InvalidRequest
from tokenrouter.policies.checkpoints import DEFAULT_FOLDER, KINDS, citer, collm, load_router, r2r
from tokenrouter.policies.checkpoints.win_rate import Classifier
from tools.demo_models.task import load_problems

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
FOLDER = REPOSITORY / DEFAULT_FOLDER
HIDDEN = 64


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_there_and_says_what_it_was_trained_for(kind: str) -> None:
    router = load_router(FOLDER / f"{kind}.safetensors", kind)
    assert router.models == ("small", "large")
    assert router.threshold is not None
    assert 0.0 < router.threshold < 1.0


def test_all_files_together_are_small() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(KINDS)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 2_000_000


def test_the_networks_fit_the_small_model() -> None:
    assert r2r.load_r2r(FOLDER / "r2r.safetensors").sizes == {"hidden": HIDDEN, "token": HIDDEN, "logits": 100}
    assert citer.load_citer(FOLDER / "citer.safetensors").hidden_size == HIDDEN
    assert collm.load_deferral(FOLDER / "collm.safetensors").hidden_size == HIDDEN


def test_the_classifier_sends_about_half_of_the_demo_problems_to_the_large_model() -> None:
    classifier = Classifier(FOLDER / "query_level.safetensors")
    assert classifier.threshold is not None
    problems = load_problems(ROOT / "configs/demo/problems.jsonl")
    chosen = sum(classifier(problem.prompt) >= classifier.threshold for problem in problems)
    assert 0.4 < chosen / len(problems) < 0.7


@pytest.mark.parametrize("kind", ["r2r", "citer", "collm"])
def test_a_policy_finds_its_own_router(kind: str) -> None:
    policy = make(kind, {}, directory=REPOSITORY)
    stored = load_router(FOLDER / f"{kind}.safetensors", kind).threshold
    assert policy.threshold(policy.network("cpu").threshold) == stored  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "params"), [("r2r", {}), ("citer", {}), ("query_level", {"router": "classifier"})])
def test_without_a_router_there_is_no_default(kind: str, params: dict[str, str], tmp_path: Path) -> None:
    for directory in (tmp_path, None):
        with pytest.raises(InvalidRequest, match="checkpoint"):
            make(kind, params, directory=directory)


def test_a_named_checkpoint_goes_before_the_default(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"elsewhere\.safetensors"):
        make("r2r", {"checkpoint": "elsewhere.safetensors"}, directory=REPOSITORY).prepare("small")


def test_collm_takes_a_logit_column_if_it_is_named_or_no_row_is_there(tmp_path: Path) -> None:
    assert make("collm", {}, directory=REPOSITORY).uses_checkpoint()  # type: ignore[attr-defined]
    assert not make("collm", {"deferral_id": 3}, directory=REPOSITORY).uses_checkpoint()  # type: ignore[attr-defined]
    assert not make("collm", {}, directory=tmp_path).uses_checkpoint()  # type: ignore[attr-defined]
