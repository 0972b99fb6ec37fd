"""What commands have in common: how they refuse, show progress and write tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.commands import run
from tokenrouter.errors import InvalidRequest
from tokenrouter.metrics_page import scrape
from tools.errors import CommandError, reported
from tools.markdown import markdown
from tools.progress import LateProgress, counted

REFUSED = (CommandError("no [such] thing"), InvalidRequest("no"), FileNotFoundError(2, "gone", "x"), KeyError("also"))


def application(exc: BaseException) -> Callable[[int], None]:
    @reported(KeyError)
    def main(count: int = 1) -> None:
        raise exc

    return main


@pytest.mark.parametrize("exc", REFUSED, ids=lambda exc: type(exc).__name__)
def test_what_is_refused_is_one_line_and_exit_code_2(exc: Exception) -> None:
    result = run(application(exc), "--count", 2)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {exc}\n")


def test_ctrl_c_is_silent_and_a_fault_of_ours_keeps_its_traceback() -> None:
    result = run(application(KeyboardInterrupt()))
    assert (result.exit_code, result.output) == (130, "")
    with pytest.raises(ValueError, match="bug"):
        run(application(ValueError("bug")))


def test_a_table_in_markdown() -> None:
    assert markdown(["a", "b"], [["1", "2"], ["3", "4"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |"


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted("reading", 4) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("tools.progress.LINE_EVERY_S", -1.0)
    with counted("reading", 4) as advance, LateProgress() as other:
        advance(1)
        advance(2)
        other.note("half-way [1/2]")
    assert capsys.readouterr() == ("", "reading: 1 of 4: 25%\nreading: 3 of 4: 75%\nhalf-way [1/2]\n")


@pytest.fixture
def metrics_url() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'tokenrouter_queued{model="a"} 3\n')

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def test_metrics_are_read_past_a_proxy(metrics_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert scrape(metrics_url).value("tokenrouter_queued", model="a") == 3
