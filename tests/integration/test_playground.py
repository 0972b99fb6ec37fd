"""The playground in a real browser, in front of a real tritonserver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest
from openai import OpenAI

from tests.support.chrome_trace import checked
from tests.support.openai_server import served
from tokenrouter.direct_http import http_open
from tools.browser import chromium, chromium_path
from tools.tritonserver.server import TritonServer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(chromium_path() is None, reason="Chromium is not installed: make system-packages"),
]

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROMPT = "Grüße 🙂 an alle, die zusehen"  # emulated models write the prompt, byte by byte
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt;"
WAIT_MS = 60_000
LONG = "x" * 20_000


@pytest.fixture(scope="module")
def url(shared: TritonServer, shared_repository: Path) -> Iterator[str]:
    with served(shared_repository, shared.grpc_url) as base:
        yield base


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """An open page; whatever it asks of other hosts, and every error in it, fails the test."""
    with browser.new_context(viewport={"width": 1100, "height": 900}) as context:
        made = context.new_page()
        made.set_default_timeout(WAIT_MS)
        errors: list[str] = []
        foreign: list[str] = []
        made.on("pageerror", lambda error: errors.append(str(error)))
        made.on("request", lambda request: foreign.append(request.url) if not request.url.startswith(url) else None)
        made.goto(url)
        made.locator(".pane").wait_for()
        yield made
        assert (errors, foreign) == ([], [])


def run(page: Page, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Control+Enter")
    page.locator("#status", has_text="done").wait_for()


def shown(page: Page, pane: int = 0) -> str:
    return page.locator(".pane").nth(pane).locator(".text").text_content() or ""


def test_tokens_are_told_apart_by_who_wrote_them(page: Page, url: str) -> None:
    page.select_option(".writer", "tokenrouter:random")
    page.fill("#seed", "7")
    run(page, PROMPT)
    assert shown(page) == PROMPT
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        choice = client.completions.create(
            model="tokenrouter:random",
            prompt=PROMPT,
            seed=7,
            max_tokens=128,
            temperature=0,
            extra_body={"return_routing": True},
        ).choices[0]
    writers = choice.model_extra["routing"]["writers"] if choice.model_extra else []
    facts = page.locator(".facts").inner_text()
    for model in ("small", "large"):
        assert f"by {model}\n{writers.count(model)} (" in facts
    assert "hand-offs" in facts
    kinds = {"small": ".w0", "large": ".w1"}
    assert all(page.locator(f".text {kind}").count() for kind in kinds.values())
    underlined = "(element) => getComputedStyle(element).borderBottomStyle"
    assert {page.locator(f".text {kind}").first.evaluate(underlined) for kind in kinds.values()} == {"none", "solid"}


def test_what_a_prompt_holds_is_shown_and_never_run(page: Page) -> None:
    run(page, HOSTILE)
    assert shown(page) == HOSTILE
    assert page.locator(".text img, .text script, .text b").count() == 0
    assert page.title() == "TokenRouter playground"


def test_a_second_policy_beside_it_and_the_link_to_both(page: Page, browser: Browser) -> None:
    page.check("#beside")
    second = page.locator(".pane").nth(1)
    second.locator(".writer").select_option("tokenrouter:random")
    second.locator(".knobs summary").click()
    second.locator('[name="p"]').fill("1")
    run(page, PROMPT)
    assert shown(page) == shown(page, 1) == PROMPT
    assert "by small" not in second.locator(".facts").inner_text()
    with browser.new_context() as context:
        again = context.new_page()
        again.goto(page.url)
        again.locator(".pane").nth(1).wait_for()
        assert again.input_value("#prompt") == PROMPT
        assert again.locator(".pane").nth(1).locator('[name="p"]').input_value() == "1"
    assert PROMPT not in page.url.split("#")[0]  # the prompt stays in the browser


def test_a_knob_that_the_policy_refuses_says_why(page: Page) -> None:
    page.select_option(".writer", "tokenrouter:random")
    page.locator(".knobs summary").click()
    page.locator('[name="p"]').fill("7")
    run(page, PROMPT)
    assert "policy_params.p" in page.locator(".pane .error").inner_text()


def test_probabilities_and_the_keyboard(page: Page) -> None:
    run(page, "abc")
    page.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    told = page.locator("output.token").inner_text()
    assert told.startswith('"b" by ')
    assert "%" in told


def test_escape_stops(page: Page) -> None:
    page.fill("#max_tokens", str(len(LONG)))
    page.fill("#prompt", LONG)
    page.press("#prompt", "Control+Enter")
    page.locator(".text .tok").first.wait_for()
    page.keyboard.press("Escape")
    page.locator("#status", has_text="done").wait_for()
    assert "stopped here" in page.locator(".facts").inner_text()


def test_a_chat(page: Page) -> None:
    page.select_option("#mode", "chat")
    run(page, "hi")
    assert shown(page) == "user:hi;"


def test_offline_and_away(page: Page, shared: TritonServer, shared_repository: Path, browser: Browser) -> None:
    page.context.set_offline(True)
    run(page, PROMPT)
    assert "this browser is offline" in page.locator(".pane .error").inner_text()
    with browser.new_context() as context:
        other = context.new_page()
        with served(shared_repository, shared.grpc_url) as base:
            other.goto(base)
            other.locator(".pane").wait_for()
        run(other, PROMPT)
        assert "does not answer: it is away" in other.locator(".pane .error").inner_text()


def test_a_timeline_is_recorded_and_downloaded(page: Page) -> None:
    page.fill("#seconds", "1")
    with page.expect_download() as download:
        page.click("#record")
        run(page, PROMPT)
    assert download.value.suggested_filename == "trace.json"
    events = checked(json.loads(download.value.path().read_text("utf-8")))
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {"models"}
    page.fill("#seconds", "600")
    page.click("#record")
    page.locator("#error", has_text="seconds").wait_for()


def test_an_api_key_is_asked_for(shared: TritonServer, shared_repository: Path, browser: Browser) -> None:
    with served(shared_repository, shared.grpc_url, api_key="secret") as base, browser.new_context() as context:
        page = context.new_page()
        page.goto(base)
        page.locator("#key").fill("secret")
        page.locator("#use-key").click()
        page.locator(".pane").wait_for()
        run(page, "abc")
        assert shown(page) == "abc"
        assert "secret" not in page.url
        with pytest.raises(HTTPError, match="401"):
            http_open(f"{base}/playground/timeline?seconds=1", timeout=30)


def test_without_scripts_and_on_a_narrow_dark_screen(browser: Browser, url: str) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(url)
        assert "needs JavaScript" in page.inner_text("noscript")
    with browser.new_context(viewport={"width": 360, "height": 700}, color_scheme="dark") as context:
        page = context.new_page()
        page.goto(url)
        page.locator(".pane").wait_for()
        run(page, LONG[:300])
        widths = json.loads(page.evaluate("JSON.stringify([document.documentElement.scrollWidth, innerWidth])"))
        assert widths[0] <= widths[1]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
