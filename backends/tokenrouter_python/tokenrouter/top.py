"""`tokenrouter top`: what a server does now, as a table that renews itself. Everything comes from the metrics page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from urllib.error import URLError

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenrouter.errors import ModelUnavailable, RouterError
from tokenrouter.metrics_page import TAKEN, Scrape, scrape

_PREFIX = "tokenrouter_"
_MODEL_COLUMNS = (
    "model", "batch", "threshold", "in flight", "residents", "KV used", "KV leased", "steps/s", "tokens/s",
    "hand-offs/s", "step ms",
)  # fmt: skip
_ENTRY_COLUMNS = (
    "entry", "in flight", "queue", "requests/s", "hand-offs/s", "failed/s", "first token ms", "between tokens ms",
)  # fmt: skip
_QUANTILE = 0.5


def look(url: str) -> Scrape:
    """The server's series.

    Raises:
        ModelUnavailable: it does not answer, or answers with something else than a metrics page of ours.
    """
    try:
        page = scrape(url, _PREFIX)
    except (OSError, URLError, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        raise ModelUnavailable(
            f"{url} does not answer ({reason}); --metrics-url names the server's metrics page"
        ) from exc
    if not page.labels(TAKEN, "model"):
        raise ModelUnavailable(
            f"{url} has no {TAKEN}: no model of TokenRouter is loaded there, or one of a version before 0.1"
        )
    return page


def tables(now: Scrape, before: Scrape) -> RenderableType:
    """One table of the LLMs and one of the entry models.

    Args:
        now: the page.
        before: an earlier one; rates are those since then, by each model's own clock.
    """
    rates = _Rates(now, before)
    entries, models = _table(_ENTRY_COLUMNS), _table(_MODEL_COLUMNS)
    for name in now.labels("tokenrouter_queued", "model"):
        entries.add_row(*_cells(_entry_row(name, rates)))
    for name in now.labels("tokenrouter_kv_blocks", "model"):
        models.add_row(*_cells(_model_row(name, rates)))
    return Group(entries, models)


class _Rates:
    def __init__(self, now: Scrape, before: Scrape) -> None:
        self.now, self.added, self._before = now, now.since(before), before

    def per_second(self, name: str, model: str) -> float:
        """Of a counter; 0 while the model publishes nothing, because it has nothing to do."""
        seconds = self.added.value(TAKEN, model=model)
        return max(0.0, self.added.value(name, model=model)) / seconds if seconds > 0 else 0.0

    def gauge(self, name: str, model: str) -> float:
        return self.now.value(name, model=model)

    def recent(self, name: str, model: str) -> Scrape:
        """Where a histogram's counts are: those since the earlier look, or all if nothing came since."""
        return self.added if self.added.value(f"{name}_count", model=model) > 0 else self.now


def _entry_row(name: str, rates: _Rates) -> list[str | float]:
    first, between = f"{_PREFIX}time_to_first_token_seconds", f"{_PREFIX}inter_token_seconds"
    return [
        name,
        rates.gauge("tokenrouter_in_flight", name),
        rates.gauge("tokenrouter_queued", name),
        rates.per_second("tokenrouter_requests", name),
        rates.per_second("tokenrouter_handoffs", name),
        rates.per_second("tokenrouter_failed", name),
        1e3 * rates.recent(first, name).quantile(first, _QUANTILE, model=name),
        1e3 * rates.recent(between, name).quantile(between, _QUANTILE, model=name),
    ]


def _model_row(name: str, rates: _Rates) -> list[str | float]:
    batch, step = "tokenrouter_batch_size", "tokenrouter_step_seconds"
    blocks = rates.gauge("tokenrouter_kv_blocks", name)
    return [
        name,
        rates.recent(batch, name).mean(batch, model=name),
        rates.gauge("tokenrouter_batch_threshold", name),
        rates.gauge("tokenrouter_model_in_flight", name),
        rates.gauge("tokenrouter_residents", name),
        _share(rates.gauge("tokenrouter_kv_blocks_used", name), blocks),
        _share(rates.gauge("tokenrouter_kv_blocks_reserved", name), blocks),
        rates.per_second("tokenrouter_steps", name),
        rates.per_second("tokenrouter_committed_tokens", name),
        rates.per_second("tokenrouter_handoffs_in", name),
        1e3 * rates.recent(step, name).mean(step, model=name),
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _cells(values: list[str | float]) -> list[Text]:
    """As text, never as markup: names come from the page."""
    return [Text(value if isinstance(value, str) else _number(value)) for value in values]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.2f}"


def watch(url: str, interval_s: float, *, looks: int | None, console: Console, sleep: Callable[[float], None]) -> None:
    """Shows the tables until Ctrl-C, or for so many looks.

    Raises:
        ModelUnavailable: the server does not answer at the first look; later it is waited for.
    """
    before = look(url)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        taken = 0
        while looks is None or taken < looks:
            sleep(interval_s)
            taken += 1
            try:
                now = look(url)
            except RouterError as exc:
                live.update(Text(f"{exc}; waiting for it", style="bold red"), refresh=True)
                continue
            live.update(Group(tables(now, before), Text(_stamp(url, interval_s), style="dim")), refresh=True)
            before = now


def _stamp(url: str, interval_s: float) -> str:
    return f"{url}, {time.strftime('%H:%M:%S')}, every {interval_s:g} s"
