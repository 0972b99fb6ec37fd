"""Two minutes of chaos. Times are measured by `python -m perf.chaos`; here they are not judged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perf.chaos.run import Known, chaos
from perf.chaos.service import Service
from perf.load.known import Verdict
from tools.progress import silent

ASKED_FOR = "TOKENROUTER_CHAOS"

pytestmark = [
    pytest.mark.integration,
    # It wants the machine for itself: beside other servers processes come back too late for its loop.
    pytest.mark.skipif(ASKED_FOR not in os.environ, reason="runs by itself, after the others: make chaos"),
]

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
SECONDS = 120.0
PATIENCE_S = 240.0


@pytest.mark.timeout(900)
def test_two_minutes_of_chaos_and_every_answer_is_right_or_fails_beside_a_death() -> None:
    known = Known.of(REPOSITORY)
    with Service(REPOSITORY) as service:
        outcome = chaos(service, known, seconds=SECONDS, in_flight=16, seed=7, report=silent, patience_s=PATIENCE_S)
    assert outcome.broken() == [], service.log_text()[-5000:]
    assert outcome.judged.verdicts[Verdict.RIGHT] > 20
    assert len(outcome.events) >= 2
