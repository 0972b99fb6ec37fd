"""Rows of `perf.serving` as tables, by heading: on the screen and in documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perf.rows import Columns, Row, markdown_of, shown
from tokenrouter.batcher import Reason

_PROCESSES = {
    "tritonserver": "tritonserver",
    "orchestrator": "tokenrouter",
    "small": "small",
    "large": "large",
    "load generator": "load",
}


_FIGURES: Columns = {
    "n": ("in_flight", ""),
    "setting": ("setting", ""),
    "B {}": ("B.{}", ""),
    "tokens/s": ("tokens_per_second", ".1f"),
    "spread": ("spread", ".1%"),
    "chain": ("chain_tokens_per_second", ".1f"),
    "difference": ("difference", "+.1%"),
    "as drawn": ("difference_as_drawn", "+.1%"),
    "efficiency": ("efficiency", ".1%"),
    "batch {}": ("mean_batch.{}", ".2f"),
    "step {}": ("mean_step_ms.{}", ".2f"),
}
_DETAILS: Columns = {
    "n": ("in_flight", ""),
    "setting": ("setting", ""),
    "wait {}": ("mean_wait_ms.{}", ".2f"),
    "hand-off {}": ("mean_handoff_ms.{}", ".2f"),
    "started {}": ("started.{}", ""),
}
_CPU = "cpu_s_per_1000_tokens."


def figures(row: Row) -> dict[str, str]:
    """Measured beside predicted."""
    thresholds = dict(text.split("=") for text in row["thresholds"].split())
    return shown({**row, **{f"B.{name}": b for name, b in thresholds.items()}}, _by_model(_FIGURES, thresholds))


def details(row: Row) -> dict[str, str]:
    """What stands behind it: waits and hand-offs in ms, why steps started, CPU seconds per 1,000 tokens by process."""
    names = [text.partition("=")[0] for text in row["thresholds"].split()]
    columns = {
        **_by_model(_DETAILS, names),
        **{f"CPU {key.removeprefix(_CPU)}": (key, ".2f") for key in row if key.startswith(_CPU)},
    }
    return shown({**row, **{f"started.{name}": _reasons(row, name) for name in names}}, columns)


def _by_model(columns: Columns, names: Iterable[str]) -> Columns:
    """A column with {} once for every model."""
    return {
        heading.format(name): (column.format(name), form)
        for heading, (column, form) in columns.items()
        for name in (names if "{}" in heading else [""])
    }


def _reasons(row: Row, model: str) -> str:
    shares = {why.value: row[f"{why.value}.{model}"] for why in Reason}
    return ", ".join(f"{why} {share:.0%}" for why, share in shares.items() if share)


def against_the_model(rows: Sequence[Row]) -> str:
    """Markdown: measured, chain, simulator, per number in flight and setting."""
    columns = {
        "in flight": ("in_flight", ""),
        "thresholds": ("setting_and_thresholds", ""),
        "measured tokens/s": ("tokens_per_second", ".1f"),
        "Markov model": ("chain_tokens_per_second", ".1f"),
        "difference": ("difference", "+.1%"),
        "as drawn": ("difference_as_drawn", "+.1%"),
        "simulator": ("simulated_tokens_per_second", ".1f"),
        "of the best possible": ("efficiency", ".1%"),
    }
    named = [{**row, "setting_and_thresholds": f"{row['setting']}: {row['thresholds']}"} for row in rows]
    return _markdown(named, columns)


def efficiency(rows: Sequence[Row]) -> str:
    """Markdown: measured beside the best possible, and CPU seconds per 1,000 tokens by process."""
    columns = {
        "in flight": ("in_flight", ""),
        "thresholds": ("thresholds", ""),
        "tokens/s": ("tokens_per_second", ".1f"),
        "best possible": ("limit_tokens_per_second", ".1f"),
        "efficiency": ("efficiency", ".1%"),
        **{f"CPU, {process}": (f"{_CPU}{key}", ".2f") for process, key in _PROCESSES.items()},
    }
    return _markdown(rows, columns)


def _markdown(rows: Sequence[Row], columns: Columns) -> str:
    ordered = sorted(rows, key=lambda row: int(row["in_flight"]))
    return markdown_of([shown(row, columns) for row in ordered])
