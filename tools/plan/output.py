"""A plan as text, as JSON and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.dtmc.profile import Profile
from tools.plan.candidate import Candidate, cost
from tools.plan.demand import Demand, Objectives
from tools.plan.evaluate import Prediction
from tools.plan.search import Plan


def as_json(
    plan: Plan, profile: Profile, prices: Mapping[str, float], demand: Demand, objectives: Objectives
) -> dict[str, Any]:
    """Everything that was found; what did not come is null."""
    chosen = plan.chosen
    return {
        "replicas": _named(chosen, profile),
        "max_inflight": chosen.max_inflight,
        "batch_thresholds": chosen.thresholds(profile),
        "max_queue_delay_ms": chosen.max_queue_delay_ms(profile, _per_replica(plan)),
        "predicted": _prediction(plan.prediction),
        "cost_per_hour": plan.cost,
        "smaller": [
            {
                "replicas": _named(each, profile),
                "cost_per_hour": cost(each, profile, prices),
                "misses": list(found.misses),
                "predicted": _prediction(found),
            }
            for each, found in plan.smaller.items()
        ],
        "objectives": asdict(objectives),
        "demand": {"rate": demand.rate, "prompt_tokens": demand.mean_prompt, "output_tokens": demand.mean_output},
        "evaluated": plan.evaluated,
    }


def print_plan(plan: Plan, profile: Profile, prices: Mapping[str, float], took_s: float) -> None:
    """Two tables and a line."""
    console, chosen, found = Console(), plan.chosen, plan.prediction
    console.print(f"[bold]{_text(chosen, profile)}[/], max_inflight {chosen.max_inflight}, {_batching(plan, profile)}")
    models = Table("model", "replicas", "per hour", "utilisation", "mean batch")
    for name, count in _named(chosen, profile).items():
        models.add_row(
            name,
            str(count),
            f"{count * prices[name]:g}",
            f"{found.utilisation[name]:.0%}",
            f"{found.mean_batch[name]:.1f}",
        )
    console.print(models)
    table = Table("deployment", "per hour", "first token p50", "p99", "between tokens p50", "p99", "misses")
    for each, one in {chosen: found, **plan.smaller}.items():
        values = (one.ttft_p50_ms, one.ttft_p99_ms, one.itl_p50_ms, one.itl_p99_ms)
        shown = ("-" if math.isnan(value) else f"{value:.1f} ms" for value in values)
        table.add_row(
            _text(each, profile), f"{cost(each, profile, prices):g}", *shown, "\n".join(one.misses) or "nothing"
        )
    console.print(table)
    console.print(
        f"{found.requests} requests, {found.tokens_per_second:.0f} tokens/s, {found.mean_in_flight:.0f} in flight; "
        f"{plan.evaluated} deployments simulated in {took_s:.0f} s",
        highlight=False,
    )


def draw(
    plan: Plan,
    seen: Mapping[tuple[Candidate, int], Prediction],
    profile: Profile,
    prices: Mapping[str, float],
    objectives: Objectives,
    path: Path,
) -> None:
    """Both 99th percentiles of every deployment that was tried, against its cost; the objective is 1."""
    from matplotlib.figure import Figure

    longest = {each: found for (each, _), found in sorted(seen.items(), key=lambda item: item[0][1])}
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    costs = [cost(each, profile, prices) for each in longest]
    shares = {
        "time to first token": ("o", [one.ttft_p99_ms / objectives.ttft_p99_ms for one in longest.values()]),
        "inter-token time": ("s", [one.itl_p99_ms / objectives.itl_p99_ms for one in longest.values()]),
    }
    for label, (marker, values) in shares.items():  # what is NaN is not drawn
        axes.scatter(costs, values, marker=marker, alpha=0.6, label=f"p99 of {label}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axvline(plan.cost, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(_text(plan.chosen, profile), (plan.cost, 1.0), xytext=(4, 6), textcoords="offset points")
    axes.set_yscale("log")
    axes.set_xlabel("cost per hour")
    axes.set_ylabel("share of the objective")
    axes.legend()
    figure.savefig(path, dpi=150)


def _prediction(found: Prediction) -> dict[str, Any]:
    fields = asdict(found)
    del fields["misses"], fields["complete"]
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}


def _named(candidate: Candidate, profile: Profile) -> dict[str, int]:
    return dict(zip(profile.names, candidate.replicas, strict=True))


def _text(candidate: Candidate, profile: Profile) -> str:
    return " + ".join(f"{count} {name}" for name, count in _named(candidate, profile).items())


def _per_replica(plan: Plan) -> int:
    return math.ceil(plan.prediction.mean_in_flight / min(plan.chosen.replicas))


def _batching(plan: Plan, profile: Profile) -> str:
    thresholds = plan.chosen.thresholds(profile)
    if not thresholds:
        return "all thresholds 1"
    delay_ms = plan.chosen.max_queue_delay_ms(profile, _per_replica(plan))
    (name,) = thresholds
    return (
        f"threshold of {name} {plan.chosen.share:.0%} of the requests in flight at a replica, at most {delay_ms:g} ms"
    )
