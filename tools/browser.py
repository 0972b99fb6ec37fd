"""Debian's Chromium without a window, for the playground's pictures and tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tools.errors import CommandError

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def chromium_path() -> str | None:
    """Where Chromium is on this machine, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser.

    Raises:
        CommandError: there is none.
    """
    path = chromium_path()
    if path is None:
        raise CommandError("Chromium is not installed: make system-packages")
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
