"""Recordings as one file in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

One track per model with its steps and how many requests are ready there; one per request with the queue, its visits,
waits and steps, and a second one for what a small model did ahead. A hand-off is an arrow from the step that it left in
to the first one at the next model. Times are whole microseconds since the recording began: readers add `ts` and `dur`,
and sums of fractions are a little off, so that slices which touch would overlap.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeAlias

from tokenrouter.timeline.recording import Recording
from tokenrouter.timeline.steps import Member, Step
from tokenrouter.timeline.trail import Stay, Trail

Event: TypeAlias = dict[str, Any]
Part: TypeAlias = tuple[Step, Member]

MODELS = 1
_FIRST_REQUESTS = 10
_MOST_LISTED = 64


def write(recordings: Sequence[Recording], path: Path) -> None:
    """Writes the file, and its folder if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(recordings), encoding="utf-8")


def text(recordings: Sequence[Recording]) -> str:
    """The file's text."""
    return json.dumps(document(recordings), separators=(",", ":"))


def document(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The file as a JSON object.

    Args:
        recordings: of the models of one server, in the order of the tracks.
    """
    drawing = _Drawing(recordings)
    about = [recording.about for recording in recordings]
    return {
        "traceEvents": list(drawing.events()),
        "displayTimeUnit": "ms",
        "otherData": {
            "began_ns": drawing.began_ns,
            "seconds": round((drawing.ended_ns - drawing.began_ns) * 1e-9, 6),
            "dropped": {each.model: each.dropped for each in about if each.dropped},
        },
    }


class _Drawing:
    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.began_ns = min((each.about.began_ns for each in recordings), default=0)
        self.ended_ns = max((each.about.ended_ns for each in recordings), default=0)
        self._recordings = recordings
        self._lanes = {each.about.model: lane for lane, each in enumerate(_of_models(recordings), start=1)}
        # By orchestrator and request, then by model and visit: in order of time.
        self._parts: dict[tuple[str, int], dict[tuple[str, int], list[Part]]] = defaultdict(lambda: defaultdict(list))
        for recording in recordings:
            about = recording.about
            for step in recording.steps:
                for member in step.members:
                    request = (about.peers.get(member.peer, ""), member.request)
                    self._parts[request][about.model, member.visit].append((step, member))
        self._flows = count(1)

    def events(self) -> Iterator[Event]:
        yield from _named(MODELS, "models", 0, self._lanes)
        for recording in _of_models(self._recordings):
            yield from self._steps(recording)
        for pid, recording in enumerate(self._recordings, start=_FIRST_REQUESTS):
            if recording.trails:
                yield from self._requests(pid, recording)

    # --- models ---------------------------------------------------------------------------------------------------

    def _steps(self, recording: Recording) -> Iterator[Event]:
        model, peers = recording.about.model, recording.about.peers
        lane = self._lanes[model]
        for step in recording.steps:
            requests = [f"{peers.get(each.peer, '?')} {each.request}" for each in step.members[:_MOST_LISTED]]
            new = step.new_tokens
            arguments = {
                "batch": step.running,
                "new_tokens": new,
                "extended_tokens": new - len(step.members),
                "reason": step.reason,
                "in_flight": step.in_flight,
                "threshold": step.threshold,
                "checked_positions": step.checked,
                "requests": requests,
            }
            yield self._slice(f"batch of {step.running}", "step", MODELS, lane, step.start_ns, step.end_ns, **arguments)
        changes = [(each.ready_ns, 1) for step in recording.steps for each in step.members]
        changes += [(step.start_ns, -len(step.members)) for step in recording.steps]
        ready = 0
        for at_ns, change in sorted(changes, key=lambda each: (each[0], -each[1])):
            ready += change
            yield self._event("C", f"ready at {model}", "ready", MODELS, 0, at_ns, args={"requests": ready})

    # --- requests -------------------------------------------------------------------------------------------------

    def _requests(self, pid: int, recording: Recording) -> Iterator[Event]:
        entry = recording.about.model
        names: dict[str, int] = {}
        for trail in recording.trails:
            names[f"request {trail.request}"] = 2 * trail.request
            if trail.guesses:
                names[f"request {trail.request}, ahead"] = 2 * trail.request + 1
        yield from _named(pid, f"requests of {entry}", pid, names)
        for trail in recording.trails:
            yield from self._request(pid, 2 * trail.request, trail, self._parts[entry, trail.request])

    def _request(self, pid: int, tid: int, trail: Trail, parts: dict[tuple[str, int], list[Part]]) -> Iterator[Event]:
        begin_ns = max(trail.arrived_ns, self.began_ns)
        started_ns = trail.started_ns or trail.ended_ns or self.ended_ns
        if started_ns > begin_ns:
            yield self._slice("queue", "queue", pid, tid, begin_ns, started_ns)
        inside: set[int] = set()
        arrivals = []
        for stay in trail.stays:
            end_ns = stay.end_ns or self.ended_ns
            own = _within(parts.get((stay.replica, stay.visit), ()), stay.begin_ns, end_ns)
            inside.update(id(member) for _, member in own)
            arrivals.append((own[0][1].ready_ns if own else stay.begin_ns, own))
            yield from self._stay(pid, tid, stay, max(arrivals[-1][0], stay.begin_ns), end_ns, own)
        for (stay, following), (arrived_ns, own) in zip(pairwise(trail.stays), arrivals[1:], strict=True):
            yield from self._hand_off(pid, tid, stay, following, arrived_ns, parts.get((stay.replica, stay.visit)), own)
        yield from self._ahead(pid, tid + 1, trail, parts, inside)
        totals = {"policy": trail.policy, "prompt_tokens": trail.prompt_tokens, "before": trail.before}
        totals |= {"runs": trail.runs, "end": trail.end or "goes on", "dropped": trail.dropped}
        yield self._event(
            "i", trail.end or "goes on", "end", pid, tid, trail.ended_ns or self.ended_ns, s="t", args=totals
        )

    def _stay(
        self, pid: int, tid: int, stay: Stay, begin_ns: int, end_ns: int, parts: Iterable[Part]
    ) -> Iterator[Event]:
        arguments = {"visit": stay.visit, "replica": stay.replica, "tokens": stay.tokens, "from": stay.source}
        yield self._slice(stay.model, "visit", pid, tid, begin_ns, end_ns, **arguments)
        for step, member in parts:
            yield from self._part(pid, tid, step, member, begin_ns)

    def _part(self, pid: int, tid: int, step: Step, member: Member, not_before_ns: int = 0) -> Iterator[Event]:
        ready_ns = max(member.ready_ns, not_before_ns)
        if self._us(step.start_ns) > self._us(ready_ns):
            yield self._slice("wait", "wait", pid, tid, ready_ns, step.start_ns, reason=step.reason)
        yield self._slice(
            "step", "step", pid, tid, step.start_ns, step.end_ns, new_tokens=member.tokens, batch=step.running
        )

    def _hand_off(
        self, pid: int, tid: int, stay: Stay, following: Stay, arrived_ns: int, left: list[Part] | None, own: list[Part]
    ) -> Iterator[Event]:
        """The time between two visits, and the arrow between their steps."""
        if stay.model == following.model:
            return
        if arrived_ns > stay.end_ns:
            arguments = {"from": stay.model, "to": following.model}
            yield self._slice("hand-off", "hand-off", pid, tid, stay.end_ns, arrived_ns, **arguments)
        before = [step for step, _ in left or () if step.end_ns <= stay.end_ns]
        if not before or not own or not {stay.replica, following.replica} <= self._lanes.keys():
            return
        flow = {"id": next(self._flows)}
        # A flow starts in the slice that encloses it, so a little before that ends.
        source, target = before[-1], own[0][0]
        start_ns = max(source.start_ns, source.end_ns - 2000)
        yield self._event("s", "hand-off", "hand-off", MODELS, self._lanes[stay.replica], start_ns, **flow)
        yield self._event(
            "f", "hand-off", "hand-off", MODELS, self._lanes[following.replica], target.start_ns, bp="e", **flow
        )

    def _ahead(
        self, pid: int, tid: int, trail: Trail, parts: dict[tuple[str, int], list[Part]], inside: set[int]
    ) -> Iterator[Event]:
        """Steps outside of the visits that the orchestrator knows: guesses; and what became of them."""
        if not trail.guesses:
            return
        outside = [each for found in parts.values() for each in found if id(each[1]) not in inside]
        for step, member in sorted(outside, key=lambda each: each[0].start_ns):
            yield from self._part(pid, tid, step, member)
        for news in trail.guesses:
            for what in ("made", "confirmed", "rolled_back"):
                if guesses := getattr(news, what):
                    name = f"{guesses} {what.replace('_', ' ')}"
                    yield self._event("i", name, "guesses", pid, tid, news.at_ns, s="t", args={what: guesses})

    # --- events ---------------------------------------------------------------------------------------------------

    def _slice(self, name: str, category: str, pid: int, tid: int, start_ns: int, end_ns: int, **args: Any) -> Event:
        length = self._us(max(start_ns, end_ns)) - self._us(start_ns)
        return self._event("X", name, category, pid, tid, start_ns, dur=length, args=args)

    def _event(self, kind: str, name: str, category: str, pid: int, tid: int, at_ns: int, **more: Any) -> Event:
        return {"ph": kind, "name": name, "cat": category, "pid": pid, "tid": tid, "ts": self._us(at_ns), **more}

    def _us(self, at_ns: int) -> int:
        return max(0, at_ns - self.began_ns) // 1000


def _of_models(recordings: Iterable[Recording]) -> list[Recording]:
    """Those with steps: an entry model has none."""
    return [each for each in recordings if each.steps]


def _within(parts: Sequence[Part], begin_ns: int, end_ns: int) -> list[Part]:
    """Of parts in order of time, those whose steps lie in an interval."""
    first = bisect_right(parts, begin_ns - 1, key=lambda each: each[0].start_ns)
    last = bisect_right(parts, end_ns, key=lambda each: each[0].end_ns)
    return list(parts[first:last])


def _named(pid: int, process: str, order: int, lanes: dict[str, int]) -> Iterator[Event]:
    common = {"ph": "M", "ts": 0, "pid": pid}
    yield {**common, "name": "process_name", "tid": 0, "args": {"name": process}}
    yield {**common, "name": "process_sort_index", "tid": 0, "args": {"sort_index": order}}
    for name, tid in lanes.items():
        yield {**common, "name": "thread_name", "tid": tid, "args": {"name": name}}
        yield {**common, "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}
