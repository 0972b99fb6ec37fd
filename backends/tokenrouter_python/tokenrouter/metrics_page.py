"""Reads a server's /metrics page."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tokenrouter.direct_http import http_open

TAKEN = "tokenrouter_statistics_seconds"
"""Gauge of every model: when its numbers were taken, in seconds of the host's monotonic clock. Published last."""

IDLE_GAUGES = (
    "tokenrouter_in_flight",
    "tokenrouter_queued",
    "tokenrouter_kv_blocks_reserved",
    "tokenrouter_kv_blocks_used",
    "tokenrouter_open_requests",
    "tokenrouter_residents",
    "tokenrouter_model_in_flight",
    "tokenrouter_ledger_blocks",
    "tokenrouter_pinned",
)
"""Gauges that are 0 when no model holds or runs anything."""

_POLL_S = 0.02
_IDLE_S = 20.0
_SETTLED_S = 1.0

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """All samples of one look at /metrics, by name and labels."""

    samples: dict[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """Sum over all samples of this name whose labels include the given ones; 0 if there are none."""
        wanted = frozenset(labels.items())
        return sum(value for (sample, own), value in self.samples.items() if sample == name and wanted <= own)

    def labels(self, name: str, label: str, **labels: str) -> list[str]:
        """All values of a label among the samples of this name."""
        wanted = frozenset(labels.items())
        found = {dict(own).get(label) for sample, own in self.samples if sample == name and wanted <= own}
        return sorted(value for value in found if value is not None)

    def since(self, earlier: Scrape) -> Scrape:
        """What was added since an earlier scrape; meaningful for counters."""
        return Scrape({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})

    def mean(self, name: str, **labels: str) -> float:
        """Of what a histogram has counted; NaN if it is empty."""
        count = self.value(f"{name}_count", **labels)
        return self.value(f"{name}_sum", **labels) / count if count else math.nan

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """(upper bound, count in this bucket) of a histogram, by rising bound."""
        bounds = sorted(self.labels(f"{name}_bucket", "le", **labels), key=float)
        cumulative = [self.value(f"{name}_bucket", le=bound, **labels) for bound in bounds]
        return [
            (float(bound), high - low) for bound, low, high in zip(bounds, [0.0, *cumulative], cumulative, strict=False)
        ]

    def quantile(self, name: str, q: float, **labels: str) -> float:
        """The q-quantile of a histogram, linear within its bucket; NaN if it is empty."""
        buckets = self.buckets(name, **labels)
        target, seen, low = q * sum(count for _, count in buckets), 0.0, 0.0
        for bound, count in buckets:
            if count and seen + count >= target:
                return low if math.isinf(bound) else low + (bound - low) * (target - seen) / count
            seen, low = seen + count, bound
        return math.nan


def connected(page: str, entry: str) -> dict[str, bool]:
    """Whether each replica is connected to an entry model, as a metrics page says; empty if that has said nothing."""
    found = _parse(page, "tokenrouter_connected")
    names = found.labels("tokenrouter_connected", "subserver", model=entry)
    return {name: found.value("tokenrouter_connected", model=entry, subserver=name) > 0 for name in names}


def fetch(url: str, *, timeout_s: float = 10.0) -> str:
    """The text of a metrics page."""
    with http_open(url, timeout=timeout_s) as response:
        return str(response.read().decode("utf-8"))


def busy(url: str) -> dict[str, float]:
    """The `IDLE_GAUGES` that are not 0 on a metrics page, summed over models."""
    page = scrape(url, *IDLE_GAUGES)
    return {name: value for name in IDLE_GAUGES if (value := page.value(name))}


def still_busy(url: str) -> dict[str, float]:
    """`busy` once nobody calls any more; gauges come a little later than things happen, so 0 has to stay."""
    began_s = idle_since_s = time.monotonic()
    held: dict[str, float] = {}
    while (now_s := time.monotonic()) < began_s + _IDLE_S and now_s - idle_since_s < _SETTLED_S:
        if held := busy(url):
            idle_since_s = now_s
        time.sleep(0.1)
    return held


def scrape(url: str, *names: str) -> Scrape:
    """Fetches and parses a metrics page.

    Args:
        url: for example ``http://127.0.0.1:8002/metrics``.
        names: parses only samples whose names begin like one of these; a whole page takes some 20 ms of CPU time.
    """
    return _parse(fetch(url), *names)


def _parse(text: str, *names: str) -> Scrape:
    if names:
        text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(names))
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    # The parser names every counter's sample NAME_total, whatever the page says.
    return Scrape(
        {(sample.name.removesuffix("_total"), frozenset(sample.labels.items())): sample.value for sample in samples}
    )


def fresh_scrape(url: str, model: str, *, patience_s: float = 5.0) -> Scrape:
    """A scrape just after a model has published its numbers, which it does once a second while it works.

    So all numbers of this model belong to one moment, the value of its gauge `TAKEN`.

    Raises:
        TimeoutError: it publishes nothing, so it does nothing.
    """
    last = scrape(url, TAKEN).value(TAKEN, model=model)
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(_POLL_S)
        text = fetch(url)
        if _parse(text, TAKEN).value(TAKEN, model=model) != last:
            return _parse(text)
    raise TimeoutError(f"{url}: model {model!r} has published nothing for {patience_s:g} s; is there load?")
