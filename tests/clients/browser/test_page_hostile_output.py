"""Whatever a model writes is shown as text: no element of its own making, no script, no request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_page import Visit, answers, ask
from hostile_answer import HOSTILE
from playwright.sync_api import Browser, Page, expect

_FOREIGN_ELEMENTS = "img, script, iframe, object, embed, svg, form, input, style, base, b, u, button:not(.copy, .again)"

_RENDERED = """async ([address, text]) => {
    const { render } = await import(address);
    const place = document.createElement("div");
    place.append(render(text));
    return place.innerHTML;
}"""


@pytest.fixture
def page(visit: Visit, faulty_url: str, key: str) -> Page:
    opened = visit(f"{faulty_url}/")
    opened.get_by_label("API key").fill(key)
    return opened


@pytest.fixture(scope="module")
def rendered(browser: Browser, faulty_url: str) -> Iterator[Callable[[str], str]]:
    """The page's own renderer: Markdown to the HTML of what it made."""
    page = browser.new_page()
    page.goto(f"{faulty_url}/")
    yield lambda text: page.evaluate(_RENDERED, [f"{faulty_url}/playground/markdown.js", text])
    page.close()


def test_a_hostile_answer_in_a_chat_is_text(page: Page, shot: Any) -> None:
    ask(page, "attack the page")
    body = page.locator(".message.assistant .body")
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
    page.get_by_role("button", name="Generate").click()
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


@pytest.mark.parametrize(("text", "html"), [
    ("**bold** and *thin*, ~~gone~~ `a < b`",
     "<p><strong>bold</strong> and <em>thin</em>, <del>gone</del> <code>a &lt; b</code></p>"),
    ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
    ("# One\n## Two", "<h3>One</h3><h4>Two</h4>"),
    ("```python\nx = '<b>'\n```\nafter",
     '<pre tabindex="0" data-language="python"><code>x = \'&lt;b&gt;\'</code></pre><p>after</p>'),
    ("```\nstill coming", '<pre tabindex="0"><code>still coming</code></pre>'),
    ("- a\n- b\n  - c\n\n1. d\n2. e",
     '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="1"><li>d</li><li>e</li></ol>'),
    ("> said\n> so", "<blockquote><p>said\nso</p></blockquote>"),
    ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    ("\\*not\\* <b>bold</b> &amp;", "<p>*not* &lt;b&gt;bold&lt;/b&gt; &amp;amp;</p>"),
    ("|a|b|\n|-|-|\n|1|2|", '<div class="wide" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
     "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>"),
    ("[x](javascript:alert(1)) [y](data:text/html,z) [z](/relative)",
     "<p>[x](javascript:alert(1)) [y](data:text/html,z) [z](/relative)</p>"),
])  # fmt: skip
def test_markdown(rendered: Callable[[str], str], text: str, html: str) -> None:
    assert rendered(text) == html


@pytest.mark.parametrize("text", [
    "[" * 50_000, "[a](" * 20_000, "*a " * 30_000, "**a" * 30_000, "_" * 50_000, "`" * 50_000, "a ` b `` " * 10_000,
    ">" * 20_000, "- " * 20_000, "|" * 20_000 + "\n" + "|-" * 20_000 + "x", " " * 50_000 + "|\n" + " " * 50_000 + "|",
    "1. a\n" * 5_000, "#" * 50_000, "http://" * 10_000, "\\" * 50_000, "~~~" + " " * 50_000,
], ids=lambda text: text[:8])  # fmt: skip
def test_markdown_of_any_length_is_rendered(rendered: Callable[[str], str], text: str) -> None:
    """Quadratic time would be minutes here, which the test's time limit ends."""
    assert rendered(text) != ""
