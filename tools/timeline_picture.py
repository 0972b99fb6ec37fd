"""`python -m tools.timeline_picture`: a part of recorded timelines as a picture, a file below the other.

For documents; to look around in a timeline, open it at ui.perfetto.dev. Example:

    python -m tools.timeline_picture --trace measured.json --trace simulated.json --from-ms 1000 --output timeline.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tools.errors import CommandError, reported
from tools.targets import IMAGE_SUFFIXES, target_file

_REASONS = {"threshold": "#0072b2", "all_ready": "#009e73", "deadline": "#d55e00"}
_INSIDE = {"queue": "#bbbbbb", "wait": "#f0e442", "hand-off": "#cc79a7"}
_LANE_IN = 0.32
_MODELS = 1


class _Document(msgspec.Struct):
    traceEvents: list[dict[str, Any]]


@reported(ValueError)
def main(
    trace: Annotated[
        list[Path], typer.Option(exists=True, dir_okay=False, help="File of a timeline; may be repeated.")
    ],
    output: Annotated[Path, typer.Option(help="Picture to write.", callback=target_file(*IMAGE_SUFFIXES))] = Path(
        "timeline.png"
    ),
    from_ms: Annotated[float, typer.Option(min=0.0, help="Where the picture begins.")] = 0.0,
    length_ms: Annotated[float, typer.Option(min=1.0, help="How much of the timelines it shows.")] = 400.0,
    requests: Annotated[int, typer.Option(min=0, help="Most requests to show per file.")] = 6,
) -> None:
    """Draws models with their steps, requests with visits and waits, and the arrows of hand-offs."""
    window = (from_ms, from_ms + length_ms)
    pictures = [_Picture(path, window, requests) for path in trace]
    lanes = [max(1, len(picture.lanes)) for picture in pictures]
    figure = Figure(figsize=(13, 1.1 * len(trace) + _LANE_IN * sum(lanes)), layout="constrained")
    axes = figure.subplots(len(trace), squeeze=False, height_ratios=lanes)
    for picture, (each,) in zip(pictures, axes, strict=True):
        picture.draw(each)
    handles = [Patch(color=colour, label=f"step: {name}") for name, colour in _REASONS.items()]
    handles += [Patch(color=colour, label=name) for name, colour in _INSIDE.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(output)


class _Picture:
    """One file."""

    def __init__(self, path: Path, window: tuple[float, float], requests: int) -> None:
        try:
            events = msgspec.json.decode(path.read_bytes(), type=_Document).traceEvents
        except (msgspec.DecodeError, json.JSONDecodeError) as exc:
            raise CommandError(f"--trace {path}: no timeline: {exc}") from exc
        self._title, self._window = path.stem, window
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self._events = [event for event in events if self._shown(event)]
        seen = {(event["pid"], event["tid"]) for event in self._events if event["ph"] == "X"}
        models = [track for track in sorted(names) if track[0] == _MODELS]
        self.lanes = models + [track for track in sorted(seen) if track[0] != _MODELS][:requests]
        self._names = [names[track] for track in self.lanes]

    def _shown(self, event: dict[str, Any]) -> bool:
        start_ms: float = event["ts"] / 1e3
        return start_ms < self._window[1] and bool(start_ms + event.get("dur", 0) / 1e3 > self._window[0])

    def draw(self, axes: Axes) -> None:
        flows: dict[Any, list[dict[str, Any]]] = {}
        for event in self._events:
            track = (event["pid"], event["tid"])
            if track not in self.lanes:
                continue
            lane = self.lanes.index(track)
            if event["ph"] == "X":
                self._slice(axes, event, lane)
            elif event["ph"] in "sf":
                flows.setdefault(event["id"], []).append(event)
        for flow in flows.values():
            if len(flow) == 2:
                ends = [(e["ts"] / 1e3, self.lanes.index((e["pid"], e["tid"]))) for e in flow]
                arrow = {"arrowstyle": "->", "color": "#444444", "linewidth": 0.7, "shrinkA": 6, "shrinkB": 6}
                axes.annotate("", ends[1], ends[0], arrowprops=arrow, annotation_clip=True)
        axes.set_xlim(*self._window)
        axes.set_ylim(len(self.lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(self.lanes)), self._names, fontsize=8)
        axes.set_xlabel("ms", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(self._title, fontsize=10, loc="left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    def _slice(self, axes: Axes, event: dict[str, Any], lane: int) -> None:
        start, length = event["ts"] / 1e3, event["dur"] / 1e3
        kind, model = event["cat"], event["pid"] == _MODELS
        colour = _REASONS.get(event["args"].get("reason", ""), "#888888") if model else _INSIDE.get(kind)
        if kind == "visit":
            axes.broken_barh(
                [(start, length)], (lane - 0.42, 0.84), facecolor="none", edgecolor="#777777", linewidth=0.6
            )
            self._label(axes, event["name"], start, lane - 0.16, length, "#333333")
        elif kind == "step" and not model:
            axes.broken_barh([(start, length)], (lane + 0.08, 0.3), facecolor="#56b4e9")
        else:
            low, high = (0.42, 0.84) if model else (-0.08, 0.3)
            axes.broken_barh([(start, length)], (lane - low, high), facecolor=colour, edgecolor="white", linewidth=0.5)
            if model:
                self._label(axes, str(event["args"]["batch"]), start, lane, length, "white")

    def _label(self, axes: Axes, text: str, start: float, lane: float, length: float, colour: str) -> None:
        """In the part that is seen, if it fits."""
        left, right = max(start, self._window[0]), min(start + length, self._window[1])
        if (right - left) / (self._window[1] - self._window[0]) > 0.009 * len(text):
            axes.text((left + right) / 2, lane, text, ha="center", va="center", fontsize=7, color=colour)


if __name__ == "__main__":
    typer.run(main)
