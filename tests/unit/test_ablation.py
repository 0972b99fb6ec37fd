from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from perf.ablation.__main__ import wrapped
from perf.ablation.policies import OUTSIDE, REPREFILL
from perf.ablation.router_process import router_process
from perf.compare.workloads import load_reference
from perf.emulated.deployment import EmulatedDeployment
from perf.load.requests import random_prompts
from tokenrouter.engines.emulated.engine import EmulatedEngine
from tokenrouter.offline import TokenRouter

REFERENCE = load_reference()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    profile = REFERENCE.profile("r2r", prefill=False)
    at_once = dict.fromkeys(profile.names, math.inf)
    return EmulatedDeployment(profile, "r2r", 4, around_ms=at_once).write(tmp_path / "models")


def generated(repository: Path) -> tuple[list[Any], int]:
    """Tokens and writers of a few responses, and how many tokens the engines ran for them."""
    ran = 0
    original = EmulatedEngine.step

    def counted(self: EmulatedEngine, rows: Any, *others: Any) -> Any:
        nonlocal ran
        ran += sum(len(row.tokens) for row in rows)
        return original(self, rows, *others)

    with pytest.MonkeyPatch.context() as patch, TokenRouter.from_repository(repository) as router:
        patch.setattr(EmulatedEngine, "step", counted)
        results = router.generate([random_prompts(9, 94)(i) for i in range(4)], max_tokens=20, seed=5)
    return [(result.tokens, [(run.model, run.start) for run in result.runs]) for result in results], ran


def test_without_kv_between_visits_tokens_are_the_same_and_far_more_are_run(repository: Path) -> None:
    expected, ran = generated(repository)
    with wrapped(repository, REPREFILL):
        found, ran_again = generated(repository)
    assert found == expected
    assert ran_again > 2 * ran


@pytest.mark.parametrize("width", [0, 1000])
def test_a_router_in_another_process_decides_alike(repository: Path, width: int) -> None:
    expected, _ = generated(repository)
    with wrapped(repository, OUTSIDE, width):
        assert generated(repository)[0] == expected


def test_a_router_process_that_cannot_start_says_so(repository: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="does not start"),
        router_process(tmp_path / "s", repository, ("small", "large"), "nonsense", {}),
    ):
        pass
