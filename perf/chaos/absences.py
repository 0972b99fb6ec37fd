"""When processes were away, as the supervisor's log has it: it saw every death, whoever caused it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from math import inf

_LINE = re.compile(
    r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) supervisor: "
    r"(?:(?P<ended>\w+) \(process \d+\) ended|the process of (?P<model>\w+) (?:\(\d+\) ended|ended before it .*)"
    r"|(?P<back>\w+) is back after .*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Absence:
    """From the death of a process to its return; seconds on `time.perf_counter`, to a second. `to_s` may be inf."""

    name: str
    from_s: float
    to_s: float


def absences(log: str) -> list[Absence]:
    """Everything that died, in order, from what a launcher printed on this machine since it started."""
    offset_s = time.perf_counter() - time.time()
    found: list[Absence] = []
    away: dict[str, float] = {}
    for line in _LINE.finditer(log):
        at_s = time.mktime(time.strptime(line["at"], "%Y-%m-%d %H:%M:%S")) + offset_s
        if back := line["back"]:
            if back in away:
                found.append(Absence(back, away.pop(back), at_s + 1.0))
        else:
            away.setdefault(line["ended"] or line["model"], at_s)
    return sorted([*found, *(Absence(name, at_s, inf) for name, at_s in away.items())], key=lambda each: each.from_s)
