"""A headless Chromium of the system's, and what every visit of the page must keep to."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chat_page import Visit
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)
_FORBIDDEN = re.compile(r"Content Security Policy|Content-Security-Policy|Trusted", re.IGNORECASE)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root may not make one
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=[*sandbox, "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens an address in a fresh profile. In the end: no request left for another origin, no script failed, and the
    page's policy had nothing to refuse but what the test `provokes`. Only a test that `has_tabs` opens
    others."""
    contexts, wrong = [], []

    def opened(address: str, *, provokes: str = "", has_tabs: bool = False, **options: Any) -> Page:
        origin = "{0.scheme}://{0.netloc}/".format(urlsplit(address))
        context = browser.new_context(viewport=options.pop("viewport", {"width": 1400, "height": 860}), **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()

        def on_console(message: ConsoleMessage) -> None:
            if provokes and provokes in message.text:
                return
            if message.type == "error" and _FORBIDDEN.search(message.text):
                wrong.append(message.text)

        page.on("console", on_console)
        page.on("pageerror", lambda error: wrong.append(f"a script failed: {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        context.on("page", lambda other: has_tabs or wrong.append(f"another page: {other.url}"))
        context.on("request", lambda request: request.url.startswith(origin) or wrong.append(f"asked {request.url}"))
        page.goto(address, wait_until="load")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def shot(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Keeps a picture in the folder that TERCET_SCREENSHOTS names, for a person to look at."""
    folder = os.environ.get("TERCET_SCREENSHOTS")

    def take(page: Page, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder) / f"{name}.png")

    return take
