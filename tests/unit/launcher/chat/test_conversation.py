"""What is kept of a chat, and the commands within it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.chat.conversation import ChatEndedError, Conversation

TURN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def conversation() -> Conversation:
    made = Conversation("Be kind")
    made.add("Hi", "Hello")
    return made


def test_messages(conversation: Conversation) -> None:
    system = {"role": "system", "content": "Be kind"}
    assert conversation.messages() == [system, *TURN]
    assert conversation.messages("And?") == [system, *TURN, {"role": "user", "content": "And?"}]
    assert Conversation().messages("Hi") == TURN[:1]


def test_system(conversation: Conversation) -> None:
    assert conversation.obey("/system") == "Be kind"
    assert conversation.obey("/system  Be a pirate ") == "The system prompt is set."
    assert conversation.messages()[0] == {"role": "system", "content": "Be a pirate"}
    assert conversation.turns == TURN
    assert Conversation().obey("/system") == "There is no system prompt."


def test_clear_keeps_the_system_prompt(conversation: Conversation) -> None:
    conversation.obey("/clear")
    assert conversation.messages() == [{"role": "system", "content": "Be kind"}]


def test_save(conversation: Conversation, tmp_path: Path) -> None:
    text, as_json = tmp_path / "chat.txt", tmp_path / "chat.json"
    assert conversation.obey(f"/save {text}") == f"Written: {text}"
    assert text.read_text() == "system: Be kind\n\nuser: Hi\n\nassistant: Hello\n"
    conversation.obey(f"/save {as_json}")
    assert json.loads(as_json.read_text()) == conversation.messages()


def test_save_overwrites_nothing(conversation: Conversation, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert conversation.obey(f"/save {tmp_path}/there") == f"{tmp_path}/there exists; choose another name"
    assert (tmp_path / "there").read_text() == "mine"
    assert "No such file" in conversation.obey(f"/save {tmp_path}/no/such/folder")
    assert "No such file" in conversation.obey("/save ~no-such-user/chat")
    assert conversation.obey("/save") == "/save takes a file to write to"


def test_help_names_every_command(conversation: Conversation) -> None:
    shown = conversation.obey("/help")
    for name in ("/help", "/system", "/clear", "/save", "/exit", "Ctrl-C", "Ctrl-D", "//"):
        assert name in shown


def test_exit(conversation: Conversation) -> None:
    with pytest.raises(ChatEndedError):
        conversation.obey("/exit")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/hlep", "unknown command /hlep; did you mean /help?"),
        ("/exti", "unknown command /exti; did you mean /exit?"),
        ("/etc/passwd", "unknown command /etc/passwd; /help lists the commands"),
        ("/", "unknown command /; /help lists the commands"),
        ("/clear all", "/clear takes nothing else"),
        ("/exit now", "/exit takes nothing else"),
    ],
)
def test_what_is_no_command(conversation: Conversation, line: str, answer: str) -> None:
    assert conversation.obey(line) == answer
    assert conversation.turns == TURN
