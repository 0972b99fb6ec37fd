from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from perf.load.soak.memory import JUDGED, MEASURES, Growth, Sample, Watch, growth, look
from perf.load.soak.run import Outcome

WARM_UP_S = 60.0


def samples(resident: Callable[[float], float]) -> list[Sample]:
    """Ten minutes of a process whose other measures stay as they are."""
    return [
        Sample(float(at), "small", {**dict.fromkeys(MEASURES, 100.0), "rss_mib": resident(float(at))})
        for at in range(0, 600, 2)
    ]


def resident(values: list[Sample]) -> Growth:
    found = {row.measure: row for row in growth(values, warm_up_s=WARM_UP_S, limit=0.02)}
    assert tuple(found) == JUDGED
    assert all(row.flat for name, row in found.items() if name != "rss_mib")
    return found["rss_mib"]


@pytest.mark.parametrize(
    ("curve", "flat"),
    [
        pytest.param(lambda at: 200.0, True, id="constant"),
        pytest.param(lambda at: 200.0 + 50.0 * (at < WARM_UP_S) - 150.0 * (at == 0), True, id="warm-up-is-not-judged"),
        pytest.param(lambda at: 200.0 + (at % 10), True, id="noise"),
        pytest.param(lambda at: 200.0 + 80.0 * (at == 300), True, id="one-peak"),
        pytest.param(lambda at: 200.0 + at / 60, False, id="a-mib-per-minute"),
        pytest.param(lambda at: 200.0 + 5.0 * (at > 400), False, id="a-late-step"),
        pytest.param(lambda at: 10.0 + 0.4 * (at > 400), True, id="small-process-within-half-a-mib"),
        pytest.param(lambda at: 10.0 + 0.6 * (at > 400), False, id="small-process-beyond"),
        pytest.param(lambda at: 200.0 - at / 60, True, id="shrinks"),
    ],
)
def test_growth_beyond_the_limit_is_found(curve: Callable[[float], float], flat: bool) -> None:
    assert resident(samples(curve)).flat is flat


def test_growth_says_how_much() -> None:
    row = resident(samples(lambda at: 200.0 + at / 60))
    assert row.slope_per_hour == pytest.approx(60.0)
    assert row.last - row.first == pytest.approx(6.0, abs=0.1)
    (failure,) = Outcome(growth=[row]).failures
    assert "small: rss_mib grew from" in failure


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="run longer"):
        growth(samples(lambda at: 1.0)[:33], warm_up_s=WARM_UP_S, limit=0.02)


def test_an_outcome_names_every_failure() -> None:
    outcome = Outcome(errors=["request 3: X"], hung=2, held={"tokenrouter_queued": 1.0}, log_errors=["E1129 x"])
    assert len(outcome.failures) == 4
    assert not Outcome().failures


def test_a_look_at_this_process_sees_what_it_allocates() -> None:
    before = look(os.getpid())
    block = bytearray(os.urandom(1 << 20) * 32)
    after = look(os.getpid())
    assert set(before) == set(MEASURES)
    assert after["anonymous_mib"] - before["anonymous_mib"] > 24
    assert after["rss_mib"] == pytest.approx(
        sum(after[name] for name in ("anonymous_mib", "file_mib", "shared_mib")), 0.1
    )
    del block


def test_a_process_that_ends_is_told_once() -> None:
    watch = Watch({"own": os.getpid(), "nobody": 2**22 + 1})
    assert set(watch.look()) == set(watch.look()) == {"own"}
    assert watch.ended == ["nobody"]
    assert [sample.process for sample in watch.samples] == ["own", "own"]
    assert watch.samples[0].at_s <= watch.samples[1].at_s
