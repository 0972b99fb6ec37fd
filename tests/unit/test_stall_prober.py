"""What the prober makes of the moments of messages; that it runs against a server: tests/integration."""

from __future__ import annotations

import pytest

from perf.stall.prober import gaps_between, waits_of

TIMES = [1.0, 2.0, 2.5, 6.0]


@pytest.mark.parametrize(
    ("start_s", "end_s", "now_s", "gaps"),
    [
        pytest.param(0.0, 10.0, None, [1.0, 0.5, 3.5], id="all-of-a-stream-that-ended"),
        pytest.param(0.0, 10.0, 9.0, [1.0, 0.5, 3.5, 3.0], id="the-last-goes-on"),
        pytest.param(2.1, 2.2, None, [0.5], id="within-a-gap"),
        pytest.param(3.0, 4.0, 6.5, [3.5], id="a-stall-that-began-before"),
        pytest.param(6.2, 6.3, 6.5, [0.5], id="open-only"),
        pytest.param(6.2, 6.3, None, [], id="behind-the-end"),
    ],
)
def test_gaps_that_touch_a_time(start_s: float, end_s: float, now_s: float | None, gaps: list[float]) -> None:
    assert gaps_between([0.5], TIMES, start_s, end_s, now_s) == pytest.approx(gaps)


def test_before_the_first_message_there_is_no_gap() -> None:
    assert gaps_between([0.5], [], 0.0, 1.0, 5.0) == []


@pytest.mark.parametrize(("now_s", "gaps"), [(None, [1.0, 0.5]), (9.0, [1.0, 0.5, 3.0])])
def test_between_two_responses_there_is_no_gap(now_s: float | None, gaps: list[float]) -> None:
    """The second one, sent at 3, begins at 6."""
    assert gaps_between([0.5, 3.0], TIMES, 0.0, 10.0, now_s) == pytest.approx(gaps)
    assert gaps_between([0.5, 3.0, 7.0], TIMES, 0.0, 10.0, now_s) == pytest.approx(gaps[:2])


def test_requests_that_were_sent_in_a_time_and_one_that_still_waits() -> None:
    assert waits_of([1.0, 2.0, 4.0], [1.5, 2.25], 0.0, 9.0, 7.0) == pytest.approx([0.5, 0.25, 3.0])
    assert waits_of([1.0, 2.0, 4.0], [1.5, 2.25], 1.5, 3.0, 7.0) == pytest.approx([0.25])
    assert waits_of([1.0, 2.0], [1.5], 0.0, 9.0, None) == pytest.approx([0.5])
