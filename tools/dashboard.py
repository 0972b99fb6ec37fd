"""Draws the Grafana dashboard's panels from a running Prometheus, where Grafana itself is not at hand."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import urlencode

import typer

from tokenrouter.direct_http import http_open
from tools.errors import CommandError, reported
from tools.targets import IMAGE_SUFFIXES, target_file

DASHBOARD = Path(__file__).resolve().parents[1] / "configs/monitoring/grafana/tokenrouter.json"
_COLUMNS = 3
_POINTS = 120


@dataclass(frozen=True)
class Target:
    """One query of a panel; `legend` names the labels of a line."""

    panel: str
    expr: str
    legend: str


@dataclass(frozen=True)
class Line:
    """One line of a panel: seconds since the epoch, and values."""

    name: str
    times: list[float]
    values: list[float]


def panels(dashboard: Path = DASHBOARD) -> list[dict[str, Any]]:
    """The dashboard's panels without its row headings."""
    document = json.loads(dashboard.read_text("utf-8"))
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def targets(panel: dict[str, Any], rate_interval: str) -> Iterator[Target]:
    """A panel's queries as Prometheus takes them."""
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", rate_interval)
        yield Target(panel["title"], expr, target["legendFormat"])


def lines(prometheus: str, target: Target, *, minutes: float) -> list[Line]:
    """What Prometheus has for a query.

    Raises:
        CommandError: it is away, or refuses the query.
    """
    now = time.time()
    step = max(1.0, minutes * 60 / _POINTS)
    query = urlencode({"query": target.expr, "start": now - minutes * 60, "end": now, "step": step})
    try:
        with http_open(f"{prometheus}/api/v1/query_range?{query}", timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
    except HTTPError as exc:
        raise CommandError(f"{target.panel}: Prometheus refuses {target.expr!r}: {exc.read().decode()}") from exc
    except OSError as exc:
        raise CommandError(f"{prometheus} does not answer ({exc}); --prometheus names it") from exc
    return [_line(series, target.legend) for series in result]


def _line(series: dict[str, Any], legend: str) -> Line:
    for label, value in series["metric"].items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    points = [(float(at), float(value)) for at, value in series["values"]]
    finite = [(at, value) for at, value in points if math.isfinite(value)]
    return Line(legend, [at for at, _ in finite], [value for _, value in finite])


@reported()
def main(
    prometheus: Annotated[str, typer.Option(help="Base URL of Prometheus.")] = "http://127.0.0.1:9090",
    output: Annotated[Path, typer.Option(help="The picture.", callback=target_file(*IMAGE_SUFFIXES))] = Path(
        "dashboard.png"
    ),
    minutes: Annotated[float, typer.Option(min=0.1, help="How far back.")] = 15.0,
    rate_interval: Annotated[str, typer.Option(help="Stands for Grafana's $__rate_interval.")] = "20s",
) -> None:
    """Draws every panel of configs/monitoring/grafana/tokenrouter.json into one picture."""
    drawn = [
        (
            panel,
            [line for target in targets(panel, rate_interval) for line in lines(prometheus, target, minutes=minutes)],
        )
        for panel in panels()
    ]
    _draw(drawn, output)
    print(output)


def _draw(drawn: list[tuple[dict[str, Any], list[Line]]], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = math.ceil(len(drawn) / _COLUMNS)
    figure, grid = pyplot.subplots(
        rows, _COLUMNS, figsize=(5 * _COLUMNS, 2.9 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(drawn) :]:
        axes.set_axis_off()
    for (panel, found), axes in zip(drawn, grid.flat, strict=False):
        axes.set_title(panel["title"], fontsize=10, loc="left", fontweight="bold")
        (_table if panel["type"] == "table" else _plot)(axes, panel, found)
    figure.suptitle(
        "Drawn by tools.dashboard from Prometheus over the dashboard's own queries (not by Grafana)", fontsize=9
    )
    figure.savefig(output, dpi=80)


def _plot(axes: Any, panel: dict[str, Any], found: list[Line]) -> None:
    since = min((line.times[0] for line in found if line.times), default=0.0)
    for line in found:
        axes.plot([at - since for at in line.times], line.values, label=line.name, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.set_xlabel("s", fontsize=7)
    axes.set_ylabel(panel["fieldConfig"]["defaults"]["unit"], fontsize=7)
    if found:
        axes.legend(fontsize=6, ncols=2)


def _table(axes: Any, _: dict[str, Any], found: list[Line]) -> None:
    axes.set_axis_off()
    cells = [[line.name, f"{line.values[-1]:g}"] for line in found if line.values]
    if cells:
        axes.table(cellText=cells, colLabels=["from requests in flight", "threshold"], loc="upper center")


if __name__ == "__main__":
    typer.run(main)
