"""What a chat samples with where neither its user nor the model says it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.chat import command
from launcher.chat.config import ChatConfig
from launcher.chat.server import Server

TEMPLATE = {"has_chat_template": True}
USUAL = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}


@pytest.mark.parametrize(
    ("info", "options", "sent"),
    [
        (TEMPLATE | {"sampling_defaults": {}}, {}, USUAL),
        (TEMPLATE | {"sampling_defaults": {}}, {"temperature": 1.5}, USUAL | {"temperature": 1.5}),
        (TEMPLATE | {"sampling_defaults": {}}, {"temperature": 0.0}, {"temperature": 0.0}),
        (TEMPLATE | {"sampling_defaults": {"temperature": 0.2}}, {}, {}),
        ({}, {}, {}),  # another server than ours
    ],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_sampled_with(
    info: dict[str, Any],
    options: dict[str, Any],
    sent: dict[str, Any],
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []

    class Client:
        def __init__(self, *given: object) -> None:
            self.info = info

        async def greet(self) -> str:
            return "a model"

    monkeypatch.setattr(command, "ChatClient", Client)
    monkeypatch.setattr(command, "_answer_lines", lambda client, chat: found.append(chat.settings.sampling))
    monkeypatch.setattr(command, "_talk", lambda server, client, chat, model: found.append(chat.settings.sampling))
    monkeypatch.setattr("sys.stdin.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    command._chat(ChatConfig(**options), Server("http://127.0.0.1:1"))
    assert found == [sent]
