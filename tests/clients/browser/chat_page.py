"""What a person does on the chat tab, and what they then read."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page

Visit = Callable[..., Page]
"""Opens an address; keywords are those of a browser context."""


def ask(page: Page, text: str) -> None:
    """Sends a chat message; returns when the answer is complete, stopped or failed."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("textbox", name="Message").press("Enter")
    finished(page)


def finished(page: Page) -> None:
    page.get_by_role("button", name="Send", exact=True).and_(page.locator(":enabled")).wait_for()


def answers(page: Page) -> list[str]:
    """The texts of the model's messages."""
    return page.locator(".message.assistant .body").all_inner_texts()


def problem(page: Page) -> str:
    """What the page says went wrong."""
    return page.locator("main .problem").inner_text()
