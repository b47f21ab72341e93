"""What a person does on the chat tab, and what they then read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def reload(page: Page) -> None:
    """Loads the page anew, once the browser has stored what was changed: a transaction waits for those before it."""
    page.evaluate("""() => new Promise((resolve, reject) => {
        const opened = indexedDB.open(`tercet:${new URL(".", document.baseURI).pathname}`);
        opened.onerror = reject;
        opened.onsuccess = () => {
            const looked = opened.result.transaction(["chats", "heads"]).objectStore("heads").count();
            looked.onerror = reject;
            looked.onsuccess = () => { opened.result.close(); resolve(); };
        };
    })""")
    page.reload()


def act(page: Page, name: str, message: int = -1) -> None:
    """Presses a button below a message."""
    page.locator(".message").nth(message).get_by_role("button", name=name, exact=True).click()


def sent_by(page: Page, action: Callable[[], object], path: str = "**/v1/chat/completions") -> Any:
    """The body of the request that an action leads to."""
    with page.expect_request(path) as sent:
        action()
    return sent.value.post_data_json


def fold(page: Page, name: str) -> None:
    """Opens a part of the settings."""
    page.locator("#settings").get_by_text(name, exact=True).click()


def answers(page: Page) -> list[str]:
    """The texts of the model's messages."""
    return page.locator(".message.assistant > .body").all_inner_texts()


def problem(page: Page) -> str:
    """What the page says went wrong."""
    return page.locator("main .problem").inner_text()
