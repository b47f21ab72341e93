"""What /set changes."""

from __future__ import annotations

import pytest

from launcher.chat.settings import DEFAULTS, PARAMETERS, Settings


def test_values_of_the_user_win() -> None:
    settings = Settings({"top_p": 0.5}, dict(DEFAULTS))
    assert settings.sampling == {"temperature": 0.7, "top_p": 0.5, "min_p": 0.05}
    assert settings.set("temperature 1") == "temperature 1"
    assert settings.set("max-tokens 20") == "max_tokens 20"
    assert settings.sampling == {"temperature": 1.0, "top_p": 0.5, "min_p": 0.05, "max_tokens": 20}
    assert settings.set("temperature") == "temperature 0.7"
    assert settings.set("max_tokens") == "max_tokens: the server's default"
    assert settings.sampling == {"temperature": 0.7, "top_p": 0.5, "min_p": 0.05}


def test_greedy_needs_nothing_else() -> None:
    settings = Settings(defaults=dict(DEFAULTS))
    settings.set("temperature 0")
    assert settings.sampling == {"temperature": 0.0}


def test_markdown_is_no_parameter_of_a_request() -> None:
    settings = Settings()
    assert settings.renders_markdown
    settings.set("markdown off")
    assert not settings.renders_markdown and settings.sampling == {}


@pytest.mark.parametrize(("text", "answer"), [
    ("temprature 1", "unknown setting temprature; did you mean temperature?"),
    ("colour red", "unknown setting colour; /set lists them"),
    ("temperature hot", "temperature takes a number; 0 takes the most likely token"),
    ("top_k 1.5", "top_k takes a whole number"), ("markdown yes", "markdown takes on or off"),
])  # fmt: skip
def test_what_is_no_setting(text: str, answer: str) -> None:
    settings = Settings()
    assert settings.set(text) == answer
    assert settings.chosen == {}


def test_all_are_listed() -> None:
    shown = Settings({"stop": ["END"]}, {"temperature": 0.7}).set("")
    for name in PARAMETERS:
        assert name in shown
    assert "END" in shown and "0.7" in shown
