"""The same request as curl, Python and JavaScript: each sample is run as it stands on the page."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from chat_page import Visit, fold
from playwright.sync_api import Page, expect


def sample(page: Page, language: str) -> str:
    page.get_by_role("button", name=language, exact=True).click()
    return page.locator("#samples-code").inner_text()


def ran(command: list[str], key: str | None) -> str:
    environment = dict(os.environ) | ({"TERCET_API_KEY": key} if key else {})
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_all(page: Page, key: str | None) -> list[str]:
    """What curl, Python and JavaScript print. JavaScript runs in the page, where `process` is made up."""
    curl, python = (
        ran(["bash", "-c", sample(page, "curl")], key),
        ran([sys.executable, "-c", sample(page, "Python")], key),
    )
    body = sample(page, "JavaScript").replace("console.log(text)", "said.push(text)")
    variables = "const process = { env: { TERCET_API_KEY: key } }, said = [];"
    return [curl, python, page.evaluate(f"async (key) => {{ {variables} {body}; return said.join(''); }}", key)]


@pytest.fixture
def page(visit: Visit, url: str) -> Page:
    opened = visit(f"{url}/")
    opened.get_by_text("The same request as code").click()
    opened.get_by_label("Temperature").fill("0")
    return opened


def test_chat(page: Page) -> None:
    page.get_by_label("System prompt").fill("It's \"quoted\" \\ 'twice'\nand $HOME `x`")
    page.get_by_role("textbox", name="Message").fill("Hello! What is 2 plus 3?")
    page.get_by_label("Top k").fill("5")
    page.get_by_label("Stop texts").fill("never\nthis")
    fold(page, "Tools")
    page.locator("#tools-example").click()
    outputs = run_all(page, None)
    assert all("[DONE]" in outputs[index] for index in (0, 2)) and outputs[1]
    for language in ("curl", "Python", "JavaScript"):
        assert "top_k" in sample(page, language) and "get_weather" in sample(page, language)


def test_generate(page: Page) -> None:
    page.get_by_role("tab", name="Generate").click()
    page.get_by_label("Most tokens").fill("8")
    page.get_by_label("Seed").fill("3")
    for output in run_all(page, None):
        assert "Paris" in output


def test_the_key_is_a_variable_in_the_code(visit: Visit, faulty_url: str, key: str) -> None:
    page = visit(f"{faulty_url}/")
    page.get_by_text("The same request as code").click()
    page.get_by_label("API key").fill(key)
    page.get_by_role("textbox", name="Message").fill("Hello")
    assert all("one" in output and "two" in output for output in run_all(page, key))
    for language in ("curl", "Python", "JavaScript"):
        assert key not in sample(page, language).replace("api-key", "")


def test_copy(page: Page, url: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
    page.get_by_role("button", name="Copy").last.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").startswith("curl -N ")
