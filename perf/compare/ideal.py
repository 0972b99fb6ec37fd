"""Exact tokens per second of every strategy without any overhead, by the Markov models: what there is to gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perf.baselines.limits import no_wait, throughput
from perf.baselines.turns import RULES
from perf.compare.cells import OURS
from perf.compare.thresholds import Tuning
from perf.compare.workloads import Reference

COLUMNS = (*RULES, "model-sync tuned", "eager", OURS, "nobody ever waits")

Row = tuple[str, int, dict[str, float]]


def rows(reference: Reference, tuning: Tuning, policies: Sequence[str], in_flight: Sequence[int]) -> Iterator[Row]:
    """Policy, number in flight, tokens per second by strategy; step times do not depend on prompts here."""
    for policy in policies:
        profile = reference.profile(policy, prefill=False)
        for n in in_flight:
            rates = {name: throughput(profile, n, rule) for name, rule in RULES.items()}
            rates["model-sync tuned"] = tuning.model_sync(policy, profile, n).tokens_per_second
            ours = tuning.ours(policy, profile, n)
            rates["eager"], rates[OURS] = ours.eager_tokens_per_second, ours.tokens_per_second
            rates["nobody ever waits"] = no_wait(profile, n)
            yield policy, n, rates


def csv_text(found: Sequence[Row]) -> str:
    """As CSV."""
    lines = [",".join(("policy", "in_flight", *COLUMNS))]
    lines += [",".join((policy, str(n), *(f"{rates[c]:.2f}" for c in COLUMNS))) for policy, n, rates in found]
    return "\n".join(lines) + "\n"


def markdown(found: Sequence[Row]) -> str:
    """As a Markdown table; in brackets ours over that strategy."""
    lines = [f"| policy | in flight | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for policy, n, rates in found:
        values = (f"{rates[c]:.1f}" + ("" if c == OURS else f" ({rates[OURS] / rates[c]:.2f})") for c in COLUMNS)
        lines.append(f"| {policy} | {n} | {' | '.join(values)} |")
    return "\n".join(lines)
