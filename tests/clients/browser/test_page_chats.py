"""Chats as a person keeps them: several, over reloads, edited, deleted, continued, exported and imported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_page import Visit, act, answers, ask, finished, reload, sent_by
from playwright.sync_api import Page, expect

STORY = "Tell me a story"


@pytest.fixture
def page(visit: Visit, faulty_url: str) -> Page:
    return visit(f"{faulty_url}/thinking/")


def titles(page: Page) -> list[str]:
    return page.locator(".chat-title").all_inner_texts()


def questions(page: Page) -> list[str]:
    return page.locator(".message.user > .body").all_inner_texts()


def export(page: Page, action: Any) -> str:
    """The text of the file that an action gives to the person."""
    with page.expect_download() as given:
        action()
    return Path(given.value.path()).read_text(encoding="utf-8")


def in_menu(page: Page, title: str, action: str) -> None:
    page.get_by_label(f"Actions for {title}").click()
    page.locator(".menu[open]").get_by_role("button", name=action, exact=True).click()


def grows(page: Page, length: int) -> None:
    """Waits until the answer has more characters."""
    expect(page.locator(".message.assistant > .body")).to_have_text(re.compile(rf"[\s\S]{{{length + 1},}}"))


def test_a_reload_keeps_chat_draft_prompt_and_settings(page: Page, shot: Any) -> None:
    ask(page, "Hello")
    page.get_by_role("textbox", name="Message").fill("a draft")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Min p").fill("0.1")
    page.get_by_role("tab", name="Generate").click()
    page.get_by_label("Prompt, exactly").fill("Once")
    reload(page)
    expect(page.locator(".message")).to_have_count(2)
    assert questions(page) == ["Hello"] and answers(page) == ["one two"]
    expect(page.get_by_role("textbox", name="Message")).to_have_value("a draft")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_label("Min p")).to_have_value("0.1")
    expect(page.get_by_label("Prompt, exactly")).to_have_value("Once")
    body = sent_by(page, lambda: page.get_by_role("button", name="Send", exact=True).click())
    assert [message["content"] for message in body["messages"]] == ["Be brief.", "Hello", "one two", "a draft"]
    assert body["min_p"] == 0.1
    shot(page, "after-reload")


def test_several_chats(page: Page) -> None:
    ask(page, "The first chat")
    page.get_by_role("button", name="New chat").click()
    assert answers(page) == []
    ask(page, "Another chat")
    assert titles(page) == ["Another chat", "The first chat"]
    page.get_by_role("button", name="The first chat", exact=True).click()
    expect(page.locator(".message.user > .body")).to_have_text(["The first chat"])
    in_menu(page, "The first chat", "Rename")
    page.get_by_label("Title").fill("Renamed")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Renamed", exact=True).wait_for()
    reload(page)
    expect(page.locator(".chat-title[aria-current]")).to_have_text("Renamed")
    in_menu(page, "Renamed", "Delete")
    expect(page.locator(".chat-title")).to_have_count(1)
    assert answers(page) == []
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".chat-title")).to_have_count(2)
    assert questions(page) == ["The first chat"]


def test_a_chat_is_searched_for(page: Page) -> None:
    for number in range(5):
        page.get_by_role("button", name="New chat").click()
        ask(page, f"Chat number {number}")
    page.get_by_label("Search chats").fill("NUMBER 3")
    assert titles(page) == ["Chat number 3"]


def test_keys_for_a_new_chat_and_for_the_search(page: Page) -> None:
    for number in range(5):
        page.keyboard.press("Control+Shift+O")
        ask(page, f"Chat number {number}")
    page.keyboard.press("Control+k")
    page.keyboard.type("number 2")
    assert titles(page) == ["Chat number 2"]
    page.get_by_role("tab", name="Server").click()
    page.keyboard.press("Control+Shift+O")
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()


def test_a_question_in_the_address_is_written_and_not_sent(visit: Visit, faulty_url: str) -> None:
    page = visit(f"{faulty_url}/thinking/?q=What%20is%20%3Cb%3E%3F")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("What is <b>?")
    assert questions(page) == [] and page.url.endswith("/thinking/")
    page.get_by_role("textbox", name="Message").press("Enter")
    finished(page)
    assert questions(page) == ["What is <b>?"]


def test_an_answer_goes_on_while_another_chat_is_open(page: Page) -> None:
    page.get_by_role("textbox", name="Message").fill(STORY)
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .body")).to_contain_text("fox")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Hello")
    assert answers(page) == ["one two"]
    page.get_by_role("button", name=STORY, exact=True).click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    grows(page, len(answers(page)[0]))
    in_menu(page, STORY, "Delete")
    expect(page.locator(".chat-title")).to_have_count(1)
    reload(page)
    assert titles(page) == ["Hello"], "the deleted chat's answer does not bring it back"


def test_a_reload_in_the_middle_of_an_answer_keeps_what_had_come(page: Page) -> None:
    page.get_by_role("textbox", name="Message").fill(STORY)
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .body")).to_contain_text("fox. Once")
    page.wait_for_timeout(1200)  # what has come is kept once a second
    reload(page)
    expect(page.locator(".message.assistant > .body")).to_contain_text("Once upon a time")
    expect(page.locator(".message.assistant .facts")).to_contain_text("stopped")


def test_a_stopped_answer_is_continued(page: Page) -> None:
    page.get_by_role("textbox", name="Message").fill(STORY)
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .body")).to_contain_text("fox")
    page.keyboard.press("Escape")
    finished(page)
    before = answers(page)[0]
    body = sent_by(page, lambda: act(page, "Continue"))
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][-1]["role"] == "assistant" and body["messages"][-1]["content"].strip() == before.strip()
    grows(page, len(before) + 20)
    page.get_by_role("button", name="Stop").click()
    finished(page)
    assert len(answers(page)) == 1 and answers(page)[0].startswith(before.strip())


def test_a_question_is_edited_and_both_versions_are_kept(page: Page) -> None:
    ask(page, "Hello")
    ask(page, "And a table")
    act(page, "Edit", 0)
    page.get_by_label("Edited text").fill("Show code")
    body = sent_by(page, lambda: page.locator(".edit").get_by_role("button", name="Send").click())
    assert [message["content"] for message in body["messages"]] == ["Show code"]
    finished(page)
    assert questions(page) == ["Show code"] and "def add" in answers(page)[0]
    page.locator(".message").first.get_by_role("button", name="Earlier version").click()
    assert questions(page) == ["Hello", "And a table"]
    reload(page)
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(".message").first.locator(".versions")).to_contain_text("1 / 2")


def test_an_answer_is_generated_anew_and_edited(page: Page) -> None:
    ask(page, "Hello")
    act(page, "Edit")
    page.get_by_label("Edited text").fill("changed by me")
    page.locator(".edit").get_by_role("button", name="Save").click()
    assert answers(page) == ["changed by me"]
    act(page, "Regenerate")
    finished(page)
    assert answers(page) == ["one two"]
    page.get_by_role("button", name="Earlier version").click()
    assert answers(page) == ["changed by me"]
    body = sent_by(page, lambda: ask(page, "Next"))
    assert [message["content"] for message in body["messages"]] == ["Hello", "changed by me", "Next"]


def test_a_message_is_deleted_and_comes_back(page: Page) -> None:
    for text in ("Hello", "Second", "Third"):
        ask(page, text)
    act(page, "Delete", 2)
    assert questions(page) == ["Hello"]
    page.get_by_role("button", name="Undo").click()
    assert questions(page) == ["Hello", "Second", "Third"]
    act(page, "Delete", 0)
    assert questions(page) == []
    expect(page.locator(".chat-title")).to_have_count(0)


def test_export_and_import(page: Page, tmp_path: Path) -> None:
    ask(page, "think about a table")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Hello")
    whole = export(page, lambda: page.get_by_role("button", name="Export all").click())
    assert len(json.loads(whole)["chats"]) == 2
    text = export(page, lambda: in_menu(page, "think about a table", "Export as Markdown"))
    assert text.startswith("# think about a table\n") and "## You" in text and "| name | value |" in text
    for title in ("think about a table", "Hello"):
        in_menu(page, title, "Delete")
        expect(page.get_by_role("button", name=title, exact=True)).to_have_count(0)
    file = tmp_path / "chats.json"
    file.write_text(whole, encoding="utf-8")
    page.locator("#import-input").set_input_files(file)
    expect(page.locator(".chat-title")).to_have_count(2)
    assert questions(page) in (["think about a table"], ["Hello"])


def test_messages_of_the_api_are_imported(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    parts = [{"type": "text", "text": "Hi"}]
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Ho"},
    ]
    file.write_text(json.dumps({"messages": messages}))
    page.locator("#import-input").set_input_files(file)
    expect(page.locator(".message")).to_have_count(2)
    assert (questions(page), answers(page)) == (["Hi"], ["Ho"])


@pytest.mark.parametrize("text", [
    "no json", "[]x", '{"chats": 3}', '{"format": "tercet-chats", "version": 1, "chats": [null]}',
    '{"format": "tercet-chats", "version": 1, "chats": [{"messages": [{"role": "root", "content": "x"}]}]}',
    '[{"role": "user", "content": {"a": 1}}, 7]',
])  # fmt: skip
def test_files_that_are_none_of_ours_are_refused(page: Page, tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    page.locator("#import-input").set_input_files(file)
    expect(page.locator("#toast")).to_contain_text("bad.json: ")
    expect(page.locator(".chat-title")).to_have_count(0)


def test_a_hostile_file_is_text(page: Page, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    message = {"id": "a", "parent": "a", "role": "assistant", "content": hostile, "images": ["javascript:alert(1)", "https://x.example/"],
               "reasoning": hostile, "finish": hostile, "name": hostile, "extra": hostile}  # fmt: skip
    chat = {"id": hostile, "title": hostile, "head": "a", "messages": [message], "created": "x"}
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps({"format": "tercet-chats", "version": 1, "chats": [chat]}))
    page.locator("#import-input").set_input_files(file)
    expect(page.locator(".message.assistant > .body")).to_have_text(hostile)
    page.locator(".reasoning summary").click()
    assert titles(page) == [hostile[:60]]
    assert page.locator("main img").count() == 0


def test_a_browser_that_keeps_nothing(visit: Visit, faulty_url: str) -> None:
    page = visit(f"{faulty_url}/thinking/")
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('off'); } });")
    reload(page)
    expect(page.locator("#chats-note")).to_contain_text("keeps nothing")
    ask(page, "Hello")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Hello", exact=True).click()
    assert answers(page) == ["one two"]


def test_two_tabs_see_each_others_chats(visit: Visit, faulty_url: str) -> None:
    page = visit(f"{faulty_url}/thinking/", has_tabs=True)
    other = page.context.new_page()
    other.goto(page.url)
    ask(page, "Hello")
    expect(other.get_by_role("button", name="Hello", exact=True)).to_be_visible()
    other.close()
