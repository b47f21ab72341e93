"""What answers look like, and what the settings send: reasoning, code, formulas, schemas, presets, pictures, models."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from chat_page import Visit, answers, ask, finished, fold, sent_by
from playwright.sync_api import Page, Route, expect


def _png() -> bytes:
    """A picture of two by two pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head, rows = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0), b"\0" + bytes(6) + b"\0" + bytes([255] * 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PNG = _png()


@pytest.fixture
def page(visit: Visit, faulty_url: str) -> Page:
    return visit(f"{faulty_url}/thinking/")


def send(page: Page, text: str = "Hello") -> Any:
    body = sent_by(page, lambda: ask(page, text))
    finished(page)
    return body


def test_reasoning_is_folded_and_streams(page: Page, shot: Any) -> None:
    page.get_by_role("textbox", name="Message").fill("think slowly")
    page.keyboard.press("Enter")
    summary = page.locator(".reasoning summary")
    expect(summary).to_contain_text(re.compile(r"Think|Thought"))
    finished(page)
    expect(summary).to_have_text(re.compile(r"^Thought for \d+\.\d s$"))
    assert answers(page) == ["The answer is 5."]
    expect(page.locator(".reasoning .body")).to_be_hidden()
    summary.click()
    expect(page.locator(".reasoning .body strong")).to_have_text("slowly")
    shot(page, "reasoning")
    body = send(page)
    assert body["messages"][1]["reasoning_content"].startswith("First I think.")
    page.reload()
    expect(page.locator(".reasoning").first).to_be_visible()


def test_no_bound_on_the_answer_unless_one_is_set(page: Page) -> None:
    assert "max_tokens" not in send(page)
    page.get_by_label("Most tokens").fill("5")
    assert send(page)["max_tokens"] == 5


def test_code_has_colours_and_is_copied(page: Page, faulty_url: str, shot: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=faulty_url)
    ask(page, "Show code")
    expect(page.locator(".code .hljs-keyword").first).to_have_text("def")
    expect(page.locator(".code-head").first).to_contain_text("python")
    page.get_by_role("button", name="Copy code").first.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def add(a, b):\n")
    expect(page.locator(".code pre").nth(1)).to_have_text("&lt;x&gt;")
    shot(page, "code")


def test_formulas(page: Page, shot: Any) -> None:
    ask(page, "A formula")
    expect(page.locator("math")).to_have_count(3)
    expect(page.locator(".message.assistant > .body")).to_contain_text("costs $5 and $6.")
    expect(page.locator(".math").last).to_have_text("\\(\\undefinedcommand{\\)")
    shot(page, "formula")


def test_a_formula_cannot_take_the_place_of_an_element_of_the_page(page: Page) -> None:
    script = """async ([address, text]) => {
        const { render } = await import(address);
        document.body.append(render(text));  // a chat that is opened meanwhile takes nothing away there
    }"""
    text = "$$x \\label{chat-input} \\tag{1}$$ and $y$"
    page.evaluate(script, [f"{page.url}playground/markdown.js", text])
    expect(page.locator("math")).to_have_count(2)
    expect(page.locator("#chat-input")).to_have_count(1)
    expect(page.locator(".math [href], .math [id]")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_answers_break_no_accessibility_rule(visit: Visit, faulty_url: str, scheme: Any) -> None:
    page = visit(f"{faulty_url}/thinking/", color_scheme=scheme)
    for word in ("think", "Show code", "A table", "A formula"):
        ask(page, word)
    page.locator(".reasoning summary").first.click()
    page.get_by_label("Actions for think").click()
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_plain_text(page: Page) -> None:
    ask(page, "A table")
    expect(page.locator(".message.assistant table")).to_have_count(1)
    page.get_by_label("Show answers as plain text").check()
    expect(page.locator(".message.assistant table")).to_have_count(0)
    expect(page.locator(".message.assistant > .body")).to_contain_text("| name | value |")


def test_a_schema_is_sent(page: Page) -> None:
    fold(page, "JSON schema of the answer")
    page.locator("#schema-example").click()
    format_ = send(page)["response_format"]
    assert format_["type"] == "json_schema" and "city" in format_["json_schema"]["schema"]["properties"]
    page.get_by_label("JSON schema", exact=True).fill("[]")
    page.get_by_role("textbox", name="Message").fill("x")
    page.keyboard.press("Enter")
    expect(page.locator("#schema-problem")).to_contain_text("a schema is an object")


def test_every_sampling_field_is_sent(page: Page) -> None:
    fields = {"Temperature": 0.5, "Top p": 0.9, "Top k": 7, "Min p": 0.1, "Seed": 5}
    fields |= {"Repetition penalty": 1.2, "Presence penalty": 0.3, "Frequency penalty": 0.4}
    for label, value in fields.items():
        page.get_by_label(label).fill(str(value))
    page.get_by_label("Stop texts").fill("END")
    page.get_by_label("Reasoning", exact=True).select_option("low")
    body = send(page)
    assert {label: body[label.lower().replace(" ", "_")] for label in fields} == fields
    assert (body["stop"], body["reasoning_effort"]) == (["END"], "low")


def test_presets(page: Page) -> None:
    page.get_by_label("Preset", exact=True).select_option("Precise")
    assert send(page)["temperature"] == 0
    page.get_by_label("System prompt").fill("Be a pirate.")
    page.get_by_role("button", name="Save as…").click()
    page.get_by_label("Name of the preset").fill("Pirate")
    page.keyboard.press("Enter")
    page.get_by_label("Preset", exact=True).select_option("Defaults")
    page.get_by_label("System prompt").fill("")
    page.reload()
    page.get_by_label("Preset", exact=True).select_option("Pirate")
    body = send(page)
    assert body["temperature"] == 0 and body["messages"][0]["content"] == "Be a pirate."
    page.locator("#preset-delete").click()
    assert "Pirate" not in page.get_by_label("Preset", exact=True).inner_text()


def test_a_base_model_opens_on_single_prompts(visit: Visit, faulty_url: str, shot: Any) -> None:
    page = visit(f"{faulty_url}/base/")
    expect(page.get_by_role("tab", name="Generate")).to_have_attribute("aria-selected", "true")
    page.get_by_label("Prompt, exactly").fill("The story")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator("#tokens")).to_contain_text("fox")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#generate-result")).to_contain_text("Stopped after")
    page.get_by_role("button", name="Append to the prompt").click()
    expect(page.get_by_label("Prompt, exactly")).to_have_value(re.compile("^The storyOnce upon"))
    page.get_by_role("tab", name="Chat").click()
    expect(page.locator("#chat-hint")).to_contain_text("no chat template")
    expect(page.get_by_role("textbox", name="Message")).to_be_disabled()
    shot(page, "base-model")


def test_name_and_quantization_are_shown(page: Page) -> None:
    expect(page.locator("#model")).to_have_text("thinking")
    expect(page.locator("#quantization")).to_have_text("gptq")
    assert send(page)["model"] == "thinking"


def _with_json(page: Page, path: str, change: Any) -> None:
    """Answers of a GET route are changed on their way."""

    def handle(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=change(answer.json()))

    page.route(path, handle)
    page.reload()


def test_adapters_can_be_chosen(page: Page) -> None:
    adapter = {
        "id": "poems",
        "object": "model",
        "created": 1,
        "owned_by": "thinking",
        "parent": "thinking",
        "root": "poems",
        "max_model_len": 9,
    }
    _with_json(page, "**/v1/models", lambda models: models | {"data": [*models["data"], adapter]})
    page.get_by_label("Model", exact=True).select_option("poems")
    assert send(page)["model"] == "poems"
    page.get_by_role("tab", name="Generate").click()
    click = page.get_by_role("button", name="Generate", exact=True).click
    assert sent_by(page, click, "**/generate_stream")["parameters"]["adapter_id"] == "poems"


def test_pictures_by_button_paste_and_drag(page: Page, tmp_path: Path, shot: Any) -> None:
    _with_json(page, "**/info", lambda info: info | {"reads_images": True})
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body="data: [DONE]\n\n")
    )
    file = tmp_path / "picture.png"
    file.write_bytes(PNG)
    expect(page.get_by_role("button", name="Attach", exact=True)).to_be_visible()
    page.locator("#attach-input").set_input_files(file)
    expect(page.locator(".attachment")).to_have_count(1)
    for kind, target in (("paste", "#chat-input"), ("drop", "#panel-chat")):
        page.evaluate("""([kind, target, bytes]) => {
            const data = new DataTransfer();
            data.items.add(new File([Uint8Array.from(bytes)], "p.png", { type: "image/png" }));
            const options = { bubbles: true, cancelable: true };
            const event = kind === "paste" ? new ClipboardEvent(kind, { ...options, clipboardData: data })
                : new DragEvent(kind, { ...options, dataTransfer: data });
            document.querySelector(target).dispatchEvent(event);
        }""", [kind, target, list(PNG)])  # fmt: skip
    expect(page.locator(".attachment")).to_have_count(3)
    page.get_by_role("button", name="Remove picture 2").click()
    shot(page, "pictures")
    content = send(page, "What is this?")["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert all(part["image_url"]["url"].startswith("data:image/png;base64,") for part in content[:2])
    expect(page.locator(".message.user img")).to_have_count(2)
    page.reload()
    expect(page.locator(".message.user img")).to_have_count(2)
    page.get_by_text("The same request as code").click()
    expect(page.locator("#samples-code")).to_contain_text("BASE64_OF_THE_PICTURE")


def test_a_model_that_reads_text_only_gets_texts(page: Page, tmp_path: Path) -> None:
    picture, text = tmp_path / "a.png", tmp_path / "a.py"
    picture.write_bytes(PNG)
    text.write_text("x = 1\n")
    page.locator("#attach-input").set_input_files(picture)
    expect(page.locator("#toast")).to_contain_text("this model does not read pictures")
    page.locator("#attach-input").set_input_files(text)
    expect(page.get_by_role("textbox", name="Message")).to_have_value("a.py:\n```\nx = 1\n```\n")


def test_the_context_is_measured(page: Page) -> None:
    send(page)
    expect(page.locator("#context")).to_have_text(re.compile(r"^ \d+ of 2,048 tokens$"))
    page.get_by_role("textbox", name="Message").fill("many words " * 100)
    expect(page.locator("#context")).to_have_text(re.compile(r"\d{3} of 2,048 tokens, with this message$"))


def test_the_code_says_which_model(page: Page) -> None:
    page.get_by_text("The same request as code").click()
    expect(page.locator("#samples-code")).to_contain_text(re.compile(r'"model":\s*"thinking"'))  # once it is known
