"""The prose linter: what each rule finds, and which texts it reads; `make lint` reads the repository with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.prose.__main__ import complaints, main
from docs.prose.rules import RULES, Rule, findings
from docs.prose.texts import texts_of, without_code


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.bad)
def test_a_rule_finds_its_bad_example_alone(rule: Rule) -> None:
    assert [found.advice for found in findings(rule.bad)] == [rule.advice]
    assert [found.advice for found in findings(rule.bad.replace(" ", "\n"))] == [rule.advice]
    assert list(findings(rule.good)) == []


@pytest.mark.parametrize(
    "text",
    ["a model card", "a stand-in", "it stands for auto", "1 to 8 ranks", "0.1 seconds", "11 ranks", "make room for it"],
)
def test_what_only_resembles_a_finding_is_none(text: str) -> None:
    assert list(findings(text)) == []


def test_markdown_is_read_without_code_and_addresses(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```\nnobody\n```\n\n| `nobody` | [text](nobody.md) |\n|---|---|\nA line\nand nobody\n")
    assert list(complaints(page)) == [f"{page}:10: “nobody”: name the actor"]


def test_strings_docstrings_and_comments_of_python_are_read(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""First."""\n\nnobody = 1\n# A comment\n# on two lines\nprint(f"{nobody} files")\n\ndef f():\n    "Last."\n'
    )
    texts = {(line, text) for line, text in texts_of(module)}
    assert texts >= {(1, "First."), (4, "A comment\non two lines"), (6, "{} files"), (9, "Last.")}
    assert list(complaints(module)) == []


def test_code_in_a_text_keeps_its_length() -> None:
    assert without_code("see `nobody` here") == "see ######## here"


def test_the_status_says_whether_something_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.md").write_text("nobody\n")
    (tmp_path / "good.md").write_text("no request\n")
    monkeypatch.setattr("sys.argv", ["prose", str(tmp_path / "bad.md"), str(tmp_path / "good.md")])
    assert main() == 1 and capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr("sys.argv", ["prose", str(tmp_path / "good.md")])
    assert main() == 0 and capsys.readouterr().out == ""
