"""Whatever a model writes is shown as text: no element of its own making, no script, no request."""

from __future__ import annotations

from typing import Any

import pytest
from chat_page import Visit, answers, ask
from hostile_answer import HOSTILE
from playwright.sync_api import Page, expect

_FOREIGN_ELEMENTS = "img, script, iframe, object, embed, svg, form, input, style, base, b, u, button:not(.small)"


@pytest.fixture
def page(visit: Visit, faulty_url: str, key: str) -> Page:
    opened = visit(f"{faulty_url}/")
    opened.get_by_label("API key").fill(key)
    return opened


def test_a_hostile_answer_in_a_chat_is_text(page: Page, shot: Any) -> None:
    ask(page, "attack the page")
    body = page.locator(".message.assistant > .body")
    for text in ("<img src=x onerror=", "<script>", "<iframe", "javascript:alert(1)", "<svg onload="):
        expect(body).to_contain_text(text)
    assert body.locator(_FOREIGN_ELEMENTS).count() == 0
    addresses = body.locator("a").evaluate_all("links => links.map(({ href }) => href)")
    assert set(addresses) == {"https://elsewhere.example/"}, "links that a person may follow"
    assert body.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
    shot(page, "hostile-output")


def test_hostile_tokens_are_text(page: Page) -> None:
    page.get_by_role("tab", name="Generate").click()
    page.get_by_label("Prompt, exactly").fill("attack the page")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator("#generate-result")).to_contain_text("ended")
    assert page.locator("#tokens").text_content() == HOSTILE
    page.get_by_role("option").first.hover()
    assert page.locator("#tokens").locator(_FOREIGN_ELEMENTS).count() == 0
    assert page.locator("#token-details").locator("img, script").count() == 0


def test_a_hostile_question_is_text(page: Page) -> None:
    ask(page, "<img src=x onerror=alert(1)>")
    expect(page.locator(".message.user .body")).to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator("#messages img").count() == 0 and answers(page)


def test_the_policy_stops_what_a_mistake_would_let_in(visit: Visit, url: str) -> None:
    """The second line: even a script of the page's own could not turn text into elements."""
    page = visit(f"{url}/", provokes="requires 'TrustedHTML'")
    assert page.evaluate("""() => {
        try { document.body.innerHTML = "<img src=x onerror=alert(1)>"; } catch (error) { return error.name; }
    }""") == "TypeError"  # fmt: skip
