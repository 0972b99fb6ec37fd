"""Chrome's trace format by the rules of its document ("Trace Event Format"), for files that are to be opened in it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from jsonschema_rs import validator_for

_NUMBER = {"type": "integer", "minimum": 0}
_COMMON = {
    "ph": {"enum": ["X", "M", "C", "i", "s", "f"]},
    "name": {"type": "string", "minLength": 1},
    "cat": {"type": "string", "minLength": 1},
    "ts": _NUMBER,
    "pid": {"type": "integer"},
    "tid": {"type": "integer"},
    "args": {"type": "object"},
}
_NAMES = {"name": {"enum": ["process_name", "thread_name"]}, "args": {"required": ["name"]}}
_ORDER = {"name": {"enum": ["process_sort_index", "thread_sort_index"]}, "args": {"required": ["sort_index"]}}


def _kind(ph: str, required: list[str], **more: Any) -> dict[str, Any]:
    return {
        "if": {"properties": {"ph": {"const": ph}}},
        "then": {"required": required, "properties": more},
    }


SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "ts", "pid", "tid"],
                "properties": _COMMON,
                "allOf": [
                    _kind("X", ["dur", "cat"], dur=_NUMBER),
                    _kind("i", ["s", "cat"], s={"enum": ["g", "p", "t"]}),
                    _kind("C", ["args"], args={"additionalProperties": {"type": "number"}, "minProperties": 1}),
                    _kind("s", ["id", "cat"]),
                    _kind("f", ["id", "cat"], bp={"const": "e"}),
                    {
                        "if": {"properties": {"ph": {"const": "M"}}},
                        "then": {"required": ["args"], "anyOf": [{"properties": _NAMES}, {"properties": _ORDER}]},
                    },
                ],
            },
        },
    },
}
_valid = validator_for(SCHEMA)


def checked(document: Any) -> list[dict[str, Any]]:
    """The events of a document, all of which follow the rules: fields, nesting of slices, pairs of flows."""
    _valid.validate(document)
    events: list[dict[str, Any]] = document["traceEvents"]
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    for lane in slices.values():
        _assert_nested(lane)
    flows: dict[tuple[str, str, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["cat"], event["name"], event["id"]].append(event)
            lane = slices[event["pid"], event["tid"]]
            assert any(_encloses(each, event["ts"]) for each in lane), f"{event} is in no slice"
    for flow in flows.values():
        assert [each["ph"] for each in flow] == ["s", "f"], flow
        assert flow[0]["ts"] <= flow[1]["ts"], flow
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert slices.keys() <= named, "a track has no name"
    return events


def _encloses(event: dict[str, Any], ts: float) -> bool:
    return event["ts"] <= ts <= event["ts"] + event["dur"]


def _assert_nested(lane: list[dict[str, Any]]) -> None:
    """Slices of one track lie in or beside each other."""
    open_ends: list[float] = []
    for event in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1], f"{event} ends behind the slice that it is in"
        open_ends.append(end)
