"""`tokenrouter top`: the tables of a page, and what is said where there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tokenrouter.cli import app
from tokenrouter.metrics_page import Scrape
from tokenrouter.top import tables


def page(**samples: float) -> Scrape:
    """`name__model` to its value; `le` buckets as `name_bucket__model__bound`."""
    found = {}
    for key, value in samples.items():
        name, model, *bound = key.split("__")
        labels = {"model": model, **({"le": bound[0].replace("_", ".")} if bound else {})}
        found[(f"tokenrouter_{name}", frozenset(labels.items()))] = value
    return Scrape(found)


def text_of(now: Scrape, before: Scrape) -> str:
    console = Console(width=200, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(tables(now, before))
    return captured.get()


def test_rates_are_by_the_models_own_clock() -> None:
    before = page(statistics_seconds__m=10.0, kv_blocks__m=100, committed_tokens__m=50, steps__m=10)
    now = page(
        statistics_seconds__m=12.0,
        kv_blocks__m=100,
        kv_blocks_used__m=25,
        committed_tokens__m=90,
        steps__m=13,
        batch_size_sum__m=12,
        batch_size_count__m=4,
        batch_threshold__m=3,
    )
    row = text_of(now, before).splitlines()[-1].split()
    assert row[:3] == ["m", "3", "3"]
    assert row[5:7] == ["25", "%"]
    assert row[9:11] == ["1.50", "20"]


def test_an_idle_model_has_rates_of_zero_and_no_invented_times() -> None:
    same = page(statistics_seconds__e=10.0, queued__e=0)
    row = text_of(same, same).splitlines()[1].split()
    assert row == ["e", "0", "0", "0", "0", "0", "-", "-"]
    assert math.isnan(same.quantile("tokenrouter_inter_token_seconds", 0.5))


def test_names_are_text_and_never_markup() -> None:
    name = "[bold red]x[/]"
    now = Scrape({("tokenrouter_kv_blocks", frozenset({("model", name)})): 1.0})
    assert name in text_of(now, now)


class _OtherPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"nv_inference_count 3\n")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def other_page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _OtherPage)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def test_a_server_that_is_away_and_one_of_another_kind(other_page: str) -> None:
    for url, said in (("http://127.0.0.1:1/metrics", "does not answer"), (other_page, "no model of TokenRouter")):
        done = CliRunner().invoke(app, ["top", "--metrics-url", url])
        assert (done.exit_code, "Traceback" in done.output) == (2, False)
        assert said in " ".join(done.output.split())
