"""The page's Markdown: as GitHub shows it, never as HTML of the model's making, and in linear time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser

_RENDERED = """async ([address, text]) => {
    const { render } = await import(address);
    const place = document.createElement("div");
    place.append(render(text));
    return place.innerHTML;
}"""
_GROWN = """async ([address, pieces]) => {
    const { MarkdownView, render } = await import(address);
    const grown = document.createElement("div"), whole = document.createElement("div");
    const view = new MarkdownView(grown);
    let text = "", kept = 0;
    for (const piece of pieces) {
        const first = grown.firstElementChild;
        text += piece;
        view.show(text);
        if (first && first === grown.firstElementChild) kept += 1;
    }
    whole.append(render(text));
    return [grown.innerHTML, whole.innerHTML, kept];
}"""

Rendered = Callable[[str], str]


@pytest.fixture(scope="module")
def rendered(browser: Browser, faulty_url: str) -> Iterator[Rendered]:
    """The page's own renderer: Markdown to the HTML of what it made."""
    page = browser.new_page()
    page.goto(f"{faulty_url}/")
    yield lambda text: page.evaluate(_RENDERED, [f"{faulty_url}/playground/markdown.js", text])
    page.close()


@pytest.mark.parametrize(("text", "html"), [
    ("**bold** and *thin*, ~~gone~~ `a < b`",
     "<p><strong>bold</strong> and <em>thin</em>, <s>gone</s> <code>a &lt; b</code></p>"),
    ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
    ("# One\n## Two", "<h3>One</h3><h4>Two</h4>"),
    ("- a\n- b\n  - c\n\n1. d\n2. e",
     '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="1"><li>d</li><li>e</li></ol>'),
    ("3. a", '<ol start="3"><li>a</li></ol>'),
    ("> said\n> so", "<blockquote><p>said\nso</p></blockquote>"),
    ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    ("\\*not\\* <b>bold</b> &amp;", "<p>*not* &lt;b&gt;bold&lt;/b&gt; &amp;</p>"),
    ("- [x] a\n- [ ] b",
     '<ul><li><input type="checkbox" disabled="" checked="" aria-label="done"> a</li>'
     '<li><input type="checkbox" disabled="" aria-label="to do"> b</li></ul>'),
    ("|a|b|\n|:-|-:|\n|1 \\| 2|`x`|",
     '<div class="wide" tabindex="0" role="region" aria-label="Table"><table><thead><tr>'
     '<th class="left">a</th><th class="right">b</th></tr></thead><tbody><tr><td class="left">1 | 2</td>'
     '<td class="right"><code>x</code></td></tr></tbody></table></div>'),
    ("a<br>b<br/>c", "<p>a<br>b<br>c</p>"),
    ("H<sub>2</sub>O <sup>x</sup> <kbd>Esc</kbd>", "<p>H<sub>2</sub>O <sup>x</sup> <kbd>Esc</kbd></p>"),
    ("<sub>a<img></sub> <br onclick=x>", "<p>&lt;sub&gt;a&lt;img&gt;&lt;/sub&gt; &lt;br onclick=x&gt;</p>"),
    ("[x](javascript:alert(1)) [y](data:text/html,z) [z](/relative)",
     "<p>[x](javascript:alert(1)) [y](data:text/html,z) [z](/relative)</p>"),
    ("![a picture](https://elsewhere.example/)",
     '<p><a href="https://elsewhere.example/" title="https://elsewhere.example/" target="_blank" '
     'rel="noopener noreferrer nofollow">a picture</a></p>'),
    ("It costs $5 and $6.", "<p>It costs $5 and $6.</p>"),
    ("an open $x and \\(y", "<p>an open $x and (y</p>"),
])  # fmt: skip
def test_markdown(rendered: Rendered, text: str, html: str) -> None:
    assert rendered(text) == html


@pytest.mark.parametrize("text", [
    "\\(a_1 * b_2\\)", "$a_1 * b_2$", "$$a_1 * b_2$$", "\\[a_1 * b_2\\]", "\\[\na_1 * b_2\n\\]",
    "x\n$$\na_1 * b_2\n$$\ny",
])  # fmt: skip
def test_a_formula_is_kept_whole(rendered: Rendered, text: str) -> None:
    html = rendered(text)
    assert '<span class="math' in html and "<em>" not in html
    assert ("a_1 * b_2" in html) != ("<math" in html), "as it was written until it is typeset"


def test_a_fence_that_is_still_coming(rendered: Rendered) -> None:
    html = rendered("```python\nx = '<b>'\nstill coming")
    assert '<div class="code-head"><span>python</span><button type="button" class="small">Copy code</button>' in html
    assert "&lt;b&gt;" in html and "still coming" in html and "<b>" not in html


@pytest.mark.parametrize("text", [
    "# A\n\ntext *thin*\n\n- a\n- b\n\n```js\nlet x = 1;\n```\n\nend", "a\n\n[x]: https://example.org\n\n[x]\n\nb",
    "|a|b|\n|-|-|\n|1|2|\n\nafter\n===\n", "> a\n>\n> b\n\n1. c\n\n   d\n",
])  # fmt: skip
def test_a_text_that_grows_is_shown_as_if_it_had_come_at_once(browser: Browser, faulty_url: str, text: str) -> None:
    page = browser.new_page()
    page.goto(f"{faulty_url}/")
    grown, whole, kept = page.evaluate(_GROWN, [f"{faulty_url}/playground/markdown.js", list(text)])
    page.close()
    assert grown == whole
    assert kept > 0, "blocks that have not changed are the same elements"


@pytest.mark.parametrize("text", [
    "[" * 50_000, "[a](" * 20_000, "*a " * 30_000, "**a" * 30_000, "_" * 50_000, "`" * 50_000, "a ` b `` " * 10_000,
    ">" * 20_000, "- " * 20_000, "|" * 20_000 + "\n" + "|-" * 20_000 + "x", " " * 50_000 + "|\n" + " " * 50_000 + "|x",
    "1. a\n" * 5_000, "#" * 50_000, "http://" * 10_000, "\\" * 50_000, "~~~" + " " * 50_000, "$" * 50_000,
    "$a " * 20_000,
    "\\(" * 20_000, "\\[\n" * 20_000, "$$\n" * 20_000, "<" * 50_000, "<sub>" * 10_000, "word_" * 20_000, "a@" * 20_000,
    "```c\n" + "a" * 40_000, "```typescript\n" + ("a" * 900 + "\n") * 50, '```ini\n' + '"\n' * 20_000,
], ids=lambda text: text[:8])  # fmt: skip
def test_markdown_of_any_length_is_rendered(rendered: Rendered, text: str) -> None:
    """Quadratic time would be minutes here, which the test's time limit ends."""
    assert rendered(text) != ""
