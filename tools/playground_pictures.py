"""The playground's pictures: a real prompt through a server that runs, by day and by night, wide and narrow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tools.browser import chromium
from tools.errors import reported
from tools.targets import target_folder

_WAIT_MS = 60_000
_Scheme = Literal["light", "dark"]
_SHOTS: tuple[tuple[str, _Scheme, int, bool], ...] = (
    ("playground.png", "light", 1100, True),
    ("playground_narrow.png", "dark", 420, False),
)


@reported()
def main(
    openai_url: Annotated[str, typer.Option(help="Of the OpenAI-compatible server.")] = "http://127.0.0.1:9000",
    output: Annotated[Path, typer.Option(help="Folder of the pictures.", callback=target_folder())] = Path(
        "docs/images"
    ),
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Start 91: -38, *2, -47 =",
    policies: Annotated[list[str] | None, typer.Option(help="The two beside each other.")] = None,
) -> None:
    """Takes pictures of the playground with headless Chromium."""
    with chromium() as browser:
        for name, scheme, width, beside in _SHOTS:
            with browser.new_context(
                viewport={"width": width, "height": 400},
                color_scheme=scheme,
                device_scale_factor=1.5,
            ) as context:
                page = context.new_page()
                page.set_default_timeout(_WAIT_MS)
                page.goto(openai_url)
                page.locator(".pane").wait_for()
                page.fill("#prompt", prompt)
                page.set_checked("#beside", beside)
                for pane, policy in zip(page.locator(".pane").all(), policies or ["rstitch", "r2r"], strict=False):
                    pane.locator(".writer").select_option(label=policy)
                page.press("#prompt", "Control+Enter")
                page.locator("#status", has_text="done").wait_for()
                page.locator(".text .w1").first.click()
                page.screenshot(path=output / name, full_page=True)
                print(output / name)


if __name__ == "__main__":
    typer.run(main)
