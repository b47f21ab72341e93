"""The page at / in Chromium: chat, tools, generate, server, keyboard, phone, both colour schemes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from broken_proxy import broken_proxy
from chat_page import Visit, act, answers, ask, finished, fold
from playwright.sync_api import Locator, Page, expect


def greedy(page: Page) -> None:
    page.get_by_label("Temperature").fill("0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chat(visit: Visit, url: str, shot: Any, scheme: Any) -> None:
    page = visit(f"{url}/", color_scheme=scheme)
    expect(page).to_have_title("demo – Tercet")
    greedy(page)
    ask(page, "Hello! What is 2 plus 3?")
    ask(page, "What is the capital of Italy?")
    hello, italy = answers(page)
    assert hello == "Hello! 2 plus 3 is 5." and "Rome" in italy
    expect(page.locator(".message.assistant .facts").last).to_have_text(
        re.compile(r"\d+ tokens in.*, \d+ out .* tokens/s")
    )
    expect(page.locator("#announcement")).to_have_text(italy)
    ask(page, "Tell me a story about a fox.")
    expect(page.locator(".message.assistant .facts").last).to_be_in_viewport()
    shot(page, f"chat-{scheme}")
    act(page, "Regenerate")
    finished(page)
    assert len(answers(page)) == 3
    page.get_by_role("button", name="New chat").click()
    assert answers(page) == []


def test_the_system_prompt_and_the_history_are_sent(visit: Visit, url: str) -> None:
    page = visit(f"{url}/")
    greedy(page)
    page.get_by_label("System prompt").fill("Your name is Robin.")
    ask(page, "Who are you?")
    assert "Robin" in answers(page)[0]
    page.get_by_label("System prompt").fill("")
    page.get_by_role("button", name="New chat").click()
    ask(page, "My name is Clara.")
    ask(page, "What is my name?")
    assert "Clara" in answers(page)[1]


def test_a_tool_is_called_and_its_result_goes_back(visit: Visit, url: str, shot: Any) -> None:
    page = visit(f"{url}/")
    greedy(page)
    fold(page, "Tools")
    page.locator("#tools-example").click()
    ask(page, "What is the weather in Paris?")
    call = page.locator(".tool-call")
    expect(call).to_contain_text("Calls get_weather")
    expect(call.locator("pre")).to_contain_text('"location": "Paris"')
    shot(page, "tool-call")
    page.get_by_role("textbox", name="Message").fill("a draft stays where it is")
    page.get_by_label("Result of get_weather").fill('{"temperature": 21, "condition": "sunny"}')
    page.get_by_role("button", name="Send the result").click()
    expect(page.locator(".message.tool .body")).to_contain_text("sunny")
    expect(page.locator(".message.assistant > .body").last).to_have_text("It is sunny and 21 degrees in Paris.")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("a draft stays where it is")


def test_tools_that_are_no_json_are_not_sent(visit: Visit, url: str) -> None:
    page = visit(f"{url}/")
    fold(page, "Tools")
    page.get_by_label("Tools (JSON)").fill("[{]")
    page.get_by_role("textbox", name="Message").fill("Hello")
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.locator("#tools-problem")).to_contain_text("Not sent: ")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("Hello")


def test_generate_shows_how_probable_each_token_was(visit: Visit, url: str, shot: Any) -> None:
    page = visit(f"{url}/")
    page.get_by_role("tab", name="Generate").click()
    page.get_by_label("Prompt, exactly").fill("The capital of France is")
    page.get_by_label("Most tokens").fill("8")
    greedy(page)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator("#generate-result")).to_contain_text("tokens/s")
    tokens = page.get_by_role("listbox", name="Tokens").get_by_role("option")
    expect(tokens.first).to_have_text(" Paris")
    tokens.first.hover()
    details = page.locator("#token-details tbody tr")
    expect(details.first).to_contain_text(re.compile(r"␣Paris.* \d+\.\d %"))
    assert details.count() >= 3, "alternatives"
    shot(page, "generate")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(page.locator("#token-details caption")).to_contain_text("Token 2 of")
    page.keyboard.press("End")
    expect(tokens.last).to_be_focused()


def test_the_server_tab(visit: Visit, url: str, shot: Any) -> None:
    page = visit(f"{url}/")
    ask(page, "Hello")
    page.get_by_role("tab", name="Server").click()
    facts = page.locator("#facts")
    expect(facts).to_contain_text("Model\ndemo", use_inner_text=True)
    figures = page.locator("#figures")
    for name in ("Running requests", "Queued requests", "Tokens per second", "KV cache in use"):
        expect(figures).to_contain_text(name)
    expect(page.locator("#state-text")).to_have_text(re.compile(r"\d+ running · \d+ queued · [\d,]+ tokens/s"))
    shot(page, "server")


def test_a_stream_is_stopped(visit: Visit, url: str) -> None:
    page = visit(f"{url}/")
    page.get_by_label("Most tokens").fill("3000")
    page.get_by_label("Temperature").fill("2")
    page.get_by_role("textbox", name="Message").fill("Tell me a story about a fox.")
    page.route("**/v1/chat/completions", lambda route: route.continue_(
        post_data={**route.request.post_data_json, "ignore_eos": True}))  # fmt: skip
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message.assistant > .body").first).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant .facts")).to_contain_text("stopped")
    page.unroute("**/v1/chat/completions")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.get_by_label("Most tokens").fill("3")
    ask(page, "Hello")
    assert len(answers(page)) == 2


def test_what_is_no_number_is_not_sent(visit: Visit, url: str) -> None:
    page = visit(f"{url}/")
    for field, wrong in (("Temperature", "1e"), ("Seed", "9007199254740993")):
        page.get_by_label(field).press_sequentially(wrong)
        page.get_by_role("textbox", name="Message").fill("Hello")
        page.get_by_role("textbox", name="Message").press("Enter")
        expect(page.get_by_label(field)).to_be_focused()
        expect(page.get_by_role("textbox", name="Message")).to_have_value("Hello")
        page.get_by_label(field).fill("")
    assert answers(page) == []


def test_behind_a_proxy_that_adds_a_prefix(visit: Visit, url: str) -> None:
    with broken_proxy(url, prefix="/some/where") as proxy:
        page = visit(f"{proxy.url}/")
        expect(page.locator("#model")).to_have_text("demo")
        ask(page, "Hello")
        assert answers(page)[0]
        docs = visit(f"{proxy.url}/docs")
        expect(docs.get_by_text("/v1/chat/completions").first).to_be_visible()


def test_keyboard_alone(visit: Visit, url: str) -> None:
    page = visit(f"{url}/", viewport={"width": 1000, "height": 760})
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Chats", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="New chat")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Chat")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Generate")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Generate")).to_be_visible()
    page.keyboard.press("End")
    expect(page.get_by_role("tabpanel", name="Server")).to_be_visible()
    page.keyboard.press("ArrowRight")
    reach(page, page.get_by_role("textbox", name="Message"))
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    finished(page)
    assert answers(page)[0]
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edited text")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Edited text")).to_have_count(0)
    for name in ("Copy", "Edit", "Regenerate", "Delete"):
        reach(page, page.locator(".message.assistant").get_by_role("button", name=name, exact=True), "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(0)
    reach(page, page.get_by_role("button", name="Undo"))
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(1)


def reach(page: Page, target: Locator, key: str = "Tab") -> None:
    """Presses a key until the target has the focus."""
    for _ in range(60):
        if target.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{key} does not reach {target}")


def test_a_phone(visit: Visit, url: str, shot: Any) -> None:
    page = visit(f"{url}/", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.get_by_role("textbox", name="Message").fill("Tell me a story about a fox.")
    page.get_by_role("button", name="Send").tap()
    finished(page)
    for tab in ("Chat", "Generate", "Server"):
        page.get_by_role("tab", name=tab).tap()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{tab} is wider than the phone"
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), f"{tab} is longer than the phone"
        shot(page, f"phone-{tab.lower()}")
    page.get_by_role("tab", name="Chat").tap()
    for side in ("Chats", "Settings"):
        expect(page.locator(f"#{side.lower()}")).to_be_hidden()
        page.get_by_role("button", name=side, exact=True).tap()
        expect(page.locator(f"#{side.lower()}")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{side} is wider than the phone"
        shot(page, f"phone-{side.lower()}")
        page.get_by_role("button", name=side, exact=True).tap()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_rule_is_broken(visit: Visit, url: str, scheme: Any) -> None:
    page = visit(f"{url}/", color_scheme=scheme, viewport={"width": 1400, "height": 900})
    page.get_by_text("The same request as code").click()
    for name in ("JSON schema of the answer", "Tools"):
        fold(page, name)
    ask(page, "Hello")
    for tab in ("Chat", "Generate", "Server"):
        page.get_by_role("tab", name=tab).click()
        if tab == "Generate":
            page.get_by_label("Most tokens").fill("8")
            page.get_by_role("button", name="Generate", exact=True).click()
            expect(page.locator("#generate-result")).to_contain_text("tokens")
            page.get_by_role("option").first.hover()
        found = Axe().run(page).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_the_documentation(visit: Visit, url: str, shot: Any) -> None:
    page = visit(f"{url}/docs")
    page.get_by_text("/v1/chat/completions").first.click()
    expect(page.get_by_role("button", name="Try it out")).to_be_visible()
    shot(page, "docs")


def test_a_stopped_answer_is_no_failure(visit: Visit, url: str) -> None:
    page = visit(f"{url}/")
    page.get_by_role("tab", name="Server").click()
    failed = page.locator("#figures div").filter(has_text="Failed").locator("dd")
    before = failed.inner_text()
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("textbox", name="Message").fill("Tell me a story about a fox.")
    page.get_by_role("textbox", name="Message").press("Enter")
    page.get_by_role("button", name="Stop", exact=True).click()
    finished(page)
    page.get_by_role("tab", name="Server").click()
    page.wait_for_timeout(7000)  # two looks at the metrics
    expect(failed).to_have_text(before)
