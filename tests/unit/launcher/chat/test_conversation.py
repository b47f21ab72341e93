"""What is kept of a chat, and the commands within it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.chat.conversation import COMMANDS, ChatEndedError, Conversation

TURN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def conversation() -> Conversation:
    made = Conversation("Be kind")
    made.add(made.prompt("Hi"), "Hello")
    return made


def said(conversation: Conversation, line: str) -> str:
    outcome = conversation.obey(line)
    assert outcome.asks is None and outcome.edits is None
    return outcome.said


def test_messages(conversation: Conversation) -> None:
    system = {"role": "system", "content": "Be kind"}
    assert conversation.messages() == [system, *TURN]
    assert conversation.messages(conversation.prompt("And?")) == [system, *TURN, {"role": "user", "content": "And?"}]
    assert Conversation().messages({"role": "user", "content": "Hi"}) == TURN[:1]


def test_system(conversation: Conversation) -> None:
    assert said(conversation, "/system") == "Be kind"
    assert said(conversation, "/system  Be a pirate ") == "The system prompt is set."
    assert conversation.messages()[0] == {"role": "system", "content": "Be a pirate"}
    assert conversation.turns == TURN
    assert said(Conversation(), "/system") == "There is no system prompt."


def test_clear_keeps_the_system_prompt(conversation: Conversation) -> None:
    said(conversation, "/clear")
    assert conversation.messages() == [{"role": "system", "content": "Be kind"}]


def test_save(conversation: Conversation, tmp_path: Path) -> None:
    text, as_json = tmp_path / "chat.txt", tmp_path / "chat.json"
    assert said(conversation, f"/save {text}") == f"Written: {text}"
    assert text.read_text() == "system: Be kind\n\nuser: Hi\n\nassistant: Hello\n"
    said(conversation, f"/save {as_json}")
    assert json.loads(as_json.read_text()) == conversation.messages()


def test_save_overwrites_nothing(conversation: Conversation, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert said(conversation, f"/save {tmp_path}/there") == f"{tmp_path}/there exists; choose another name"
    assert (tmp_path / "there").read_text() == "mine"
    assert "No such file" in said(conversation, f"/save {tmp_path}/no/such/folder")
    assert "No such file" in said(conversation, "/save ~no-such-user/chat")
    assert said(conversation, "/save") == "/save takes a file to write to"


def test_help_names_every_command(conversation: Conversation) -> None:
    shown = said(conversation, "/help")
    for name in (*COMMANDS, "Ctrl-C", "Ctrl-D", "//"):
        assert name in shown


def test_exit(conversation: Conversation) -> None:
    with pytest.raises(ChatEndedError):
        said(conversation, "/exit")


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
    assert said(conversation, line) == answer
    assert conversation.turns == TURN


def test_retry_takes_the_last_answer_back(conversation: Conversation) -> None:
    conversation.add(conversation.prompt("And?"), "Or")
    assert conversation.obey("/retry").asks == {"role": "user", "content": "And?"}
    assert conversation.turns == TURN
    assert said(Conversation(), "/retry") == "There is no prompt yet."


def test_edit_changes_the_last_prompt(conversation: Conversation) -> None:
    assert conversation.obey("/edit").edits == TURN[0]
    assert conversation.turns == TURN, "until the new text is there"
    assert conversation.obey("/edit Ho").asks == {"role": "user", "content": "Ho"}
    assert conversation.turns == []


def test_a_picture_goes_with_the_next_prompt(tmp_path: Path) -> None:
    conversation, picture = Conversation(), tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    assert said(conversation, f"/image {picture}") == "With the next prompt: 1 picture"
    assert said(conversation, "/image https://example.org/b.jpg") == "With the next prompt: 2 pictures"
    prompt = conversation.prompt("What is this?")
    urls = [part["image_url"]["url"] for part in prompt["content"][:2]]
    assert urls == ["data:image/png;base64,iVBORw0KGgo=", "https://example.org/b.jpg"]
    assert prompt["content"][2] == {"type": "text", "text": "What is this?"}
    conversation.add(prompt, "A cat")
    edited = conversation.obey("/edit Is it a dog?").asks
    assert edited is not None and edited["content"] == [
        *prompt["content"][:2],
        {"type": "text", "text": "Is it a dog?"},
    ]
    assert conversation.prompt("And?") == {"role": "user", "content": "And?"}


def test_pictures_that_cannot_be_sent(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("<svg>")
    conversation = Conversation()
    assert "is not a PNG, JPEG, WebP or GIF picture" in said(conversation, f"/image {tmp_path}/a.png")
    assert "cannot be read: No such file" in said(conversation, "/image nowhere.png")
    assert said(conversation, "/image") == "/image takes a file or an address"
    assert conversation.prompt("x")["content"] == "x"


def test_what_was_saved_is_loaded(conversation: Conversation, tmp_path: Path) -> None:
    said(conversation, f"/save {tmp_path}/chat.json")
    other = Conversation()
    assert said(other, f"/load {tmp_path}/chat.json") == "2 messages are read."
    assert other.messages() == conversation.messages()


@pytest.mark.parametrize("text", ["no json", "{}", "[1]", '[{"role": "root", "content": "x"}]', '[{"role": "user"}]',
                                  '[{"role": "user", "content": [1]}]'])  # fmt: skip
def test_files_that_hold_no_conversation(conversation: Conversation, tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert str(tmp_path) in said(conversation, f"/load {tmp_path}/x.json")
    assert conversation.turns == TURN
    assert "No such file" in said(conversation, "/load nowhere.json")
    assert said(conversation, "/load") == "/load takes a file to read"
