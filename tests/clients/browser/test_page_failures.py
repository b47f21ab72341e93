"""What goes wrong is said in words, and the page goes on afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from broken_proxy import BrokenProxy, broken_proxy
from chat_page import Visit, answers, ask, finished, problem
from playwright.sync_api import Page, expect

CUT = "The connection was cut before the answer was complete."
FOREIGN = "What answered is not the text generation API."


@pytest.fixture
def proxy(url: str) -> Iterator[BrokenProxy]:
    with broken_proxy(url) as running:
        yield running


def generate(page: Page) -> None:
    page.get_by_role("tab", name="Generate").click()
    page.get_by_role("button", name="Generate", exact=True).click()
    page.locator("#generate-result:not(:empty)").wait_for()


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Visit, faulty_url: str, key: str, shot: Any) -> None:
    page = visit(f"{faulty_url}/")
    ask(page, "Hello")
    assert problem(page) == "The server asks for an API key. Enter the right one in the settings."
    expect(page.get_by_label("API key")).to_be_focused()
    shot(page, "key-asked-for")
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".problem")).to_contain_text("The server refuses this API key.")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message.assistant > .body")).to_have_text("one two")
    assert key not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    page.reload()
    ask(page, "Hello")
    assert answers(page) == ["one two"] * 2, "the tab still has the key"
    other = visit(f"{faulty_url}/")
    expect(other.get_by_label("API key")).to_have_value("")


def test_the_key_is_asked_for_on_the_generate_tab_too(visit: Visit, faulty_url: str) -> None:
    page = visit(f"{faulty_url}/", viewport={"width": 360, "height": 740})
    generate(page)
    assert problem(page).startswith("The server asks for an API key.")
    expect(page.get_by_label("API key")).to_be_focused()


def test_a_key_with_characters_that_no_header_has(visit: Visit, faulty_url: str) -> None:
    page = visit(f"{faulty_url}/")
    page.get_by_label("API key").fill("schlüssel ✓")
    ask(page, "Hello")
    assert problem(page) == "The API key has characters that a key cannot have."


@pytest.mark.parametrize("how", ["cut", "end"])
def test_a_cut_stream(visit: Visit, proxy: BrokenProxy, shot: Any, how: str) -> None:
    page = visit(f"{proxy.url}/")
    page.get_by_label("Temperature").fill("0")
    proxy.how = how
    page.get_by_role("textbox", name="Message").fill("Tell me a story about a fox.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message.assistant > .body")).to_contain_text("Once")
    proxy.break_off.set()
    finished(page)
    assert problem(page) == CUT and answers(page)[0].startswith("Once")
    shot(page, f"stream-{how}")
    proxy.num_bytes = 100
    generate(page)
    assert page.locator("#generate-result .problem").inner_text() == CUT
    proxy.how = "pass"
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message.assistant .facts")).to_contain_text("tokens/s")
    expect(page.locator("#panel-chat .problem")).to_have_count(0)
    generate(page)
    expect(page.locator("#generate-result")).to_contain_text("ended: ")


@pytest.mark.parametrize(("how", "words"), [("gateway", "something before it says status 502"), ("html", FOREIGN)])
def test_an_answer_of_something_else(visit: Visit, proxy: BrokenProxy, how: str, words: str) -> None:
    page = visit(f"{proxy.url}/")
    proxy.how = how
    ask(page, "Hello")
    assert words in problem(page)
    generate(page)
    assert words in page.locator("#generate-result").inner_text()


def test_a_server_that_is_gone(visit: Visit, url: str, shot: Any) -> None:
    with broken_proxy(url) as proxy:
        page = visit(f"{proxy.url}/")
        expect(page.locator("#dot.good")).to_be_attached()
    ask(page, "Hello")
    assert problem(page).startswith("The server cannot be reached.")
    expect(page.locator("#state-text")).to_contain_text("The server cannot be reached.")
    expect(page.locator("#dot.bad")).to_be_attached()
    shot(page, "server-gone")


@pytest.mark.parametrize(("prompt", "words"), [
    ("break down", "Server error: out of memory"), ("stop short", "incomplete generation"),
])  # fmt: skip
def test_an_error_within_a_stream(visit: Visit, faulty_url: str, key: str, prompt: str, words: str) -> None:
    page = visit(f"{faulty_url}/")
    page.get_by_label("API key").fill(key)
    ask(page, prompt)
    assert words in problem(page).lower() or words in problem(page)
    assert answers(page) == ["one two"], "what had come stays"


def test_a_parameter_that_the_server_refuses(visit: Visit, url: str) -> None:
    page = visit(f"{url}/")
    page.get_by_label("Top p").fill("7")
    ask(page, "Hello")
    assert problem(page).startswith("The server refused the request: ") and "top_p" in problem(page)
    expect(page.get_by_role("textbox", name="Message")).to_have_value("Hello")
    expect(page.locator(".message")).to_have_count(0)
    generate(page)
    assert "top_p" in page.locator("#generate-result").inner_text()


def test_a_message_that_is_too_long_goes_back_to_where_it_was_written(visit: Visit, url: str, shot: Any) -> None:
    page = visit(f"{url}/")
    page.get_by_label("Temperature").fill("0")
    ask(page, "Hello! What is 2 plus 3?")
    words = "many words " * 4000
    ask(page, words)
    assert problem(page).startswith("The server refused the request: ") and "). Your message is back" in problem(page)
    expect(page.get_by_role("textbox", name="Message")).to_have_value(words.strip())
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    expect(page.locator("#context")).to_have_class("over")
    shot(page, "too-long")
    ask(page, "What is the capital of Italy?")
    assert len(answers(page)) == 2 and "Rome" in answers(page)[1]
    expect(page.locator("#panel-chat .problem")).to_have_count(0)
    page.reload()
    expect(page.locator(".message.assistant > .body")).to_have_count(2)


def test_a_busy_server(visit: Visit, busy_url: str) -> None:
    page = visit(f"{busy_url}/")
    ask(page, "Hello")
    assert problem(page).startswith("The server has too much to do. Try again in ")
