"""Times at which the orchestrator looks at its deadlines, against a list that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.orchestrator.alarms import Alarms

KEYS = st.integers(0, 6)


@given(st.lists(st.tuples(st.sampled_from(("add", "drop", "pass")), st.integers(0, 50), KEYS)))
def test_the_earliest_of_those_that_were_not_dropped_is_next(steps: list[tuple[str, int, int]]) -> None:
    alarms, plain = Alarms(), list[tuple[int, int]]()
    renamed: dict[int, int] = {}  # a key that was dropped is not used again
    for step, (what, at_ns, key) in enumerate(steps):
        of = renamed.setdefault(key, 100 + step) if key else 0
        if what == "add":
            alarms.add(at_ns, of)
            plain.append((at_ns, of))
        elif what == "drop" and key:
            alarms.drop(of)
            plain = [alarm for alarm in plain if alarm[1] != of]
            del renamed[key]
        elif what == "pass":
            alarms.pass_until(at_ns)
            plain = [alarm for alarm in plain if alarm[0] > at_ns]
        assert alarms.next_ns() == min(plain, default=(None, 0))[0]


def test_what_is_over_is_not_kept() -> None:
    """A request per millisecond with a limit of an hour, sixteen at once."""
    alarms = Alarms()
    most = 0
    for key in range(1, 20_001):
        alarms.add(key * 1_000_000 + 3_600_000_000_000, key)
        alarms.add(None, key)
        if key > 16:
            alarms.drop(key - 16)
        most = max(most, len(alarms))
    assert most <= 16 + 2 * (16 + 64)
    assert alarms.next_ns() == 19_985 * 1_000_000 + 3_600_000_000_000
