"""The messages so far, and the commands that change them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.chat.pictures import PictureError, picture_part
from launcher.chat.settings import Settings
from wire.cli.spelling import closest

COMMANDS = {
    "/help": "list the commands",
    "/retry": "answer the last prompt again",
    "/edit [TEXT]": "change the last prompt and ask again; without TEXT, in the line below",
    "/set [NAME [VALUE]]": "set temperature, top_p, max_tokens and so on; without NAME, show them",
    "/model [NAME]": "ask another of the server's models; without NAME, list them",
    "/system [TEXT]": "set the system prompt; without TEXT, show it",
    "/image FILE": "send a picture, a file or an address, with the next prompt",
    "/clear": "forget the conversation, but not the system prompt",
    "/save FILE": "write the conversation, as JSON if FILE ends with .json",
    "/load FILE": "continue a conversation that was saved as JSON",
    "/exit": "end the chat; so does Ctrl-D",
}
_NAMES = [usage.split()[0] for usage in COMMANDS]
_TAKING_NOTHING = ("/help", "/retry", "/clear", "/exit")
_HELP = "\n".join(
    [
        *(f"{usage:<21}{meaning}" for usage, meaning in COMMANDS.items()),
        "Ctrl-C stops an answer; at an empty prompt it ends the chat. A prompt that begins with / is written with //.",
        "A \\ at the end of a line continues the prompt on the next one.",
    ]
)
_ROLES = ("user", "assistant", "tool")

Message = dict[str, Any]


class ChatEndedError(Exception):
    """The user has asked for the end."""


@dataclass(frozen=True)
class Outcome:
    """What came of a command."""

    said: str = ""  # what is to be shown
    asks: Message | None = None  # the prompt that is to be answered now
    edits: Message | None = None  # the prompt that the user wants to change before


@dataclass
class Conversation:
    """`turns`: user and assistant in turn, oldest first. `pictures` go with the next prompt."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    pictures: list[Message] = field(default_factory=list)

    def prompt(self, text: str) -> Message:
        """The message of a prompt, with the pictures that wait for one."""
        pictures, self.pictures = self.pictures, []
        return {"role": "user", "content": [*pictures, {"type": "text", "text": text}] if pictures else text}

    def messages(self, prompt: Message | None = None) -> list[Message]:
        """All of them, and a prompt that has no answer yet."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, *self.turns, *([] if prompt is None else [prompt])]

    def add(self, prompt: Message, answer: str) -> None:
        self.turns += [prompt, {"role": "assistant", "content": answer}]

    def obey(self, line: str) -> Outcome:
        """Does what a line that begins with `/` says. Raises ChatEndedError."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in _TAKING_NOTHING and rest:
            return Outcome(f"{name} takes nothing else")
        if name == "/exit":
            raise ChatEndedError
        if name in ("/retry", "/edit"):
            return self._ask_again(rest, is_edit=name == "/edit")
        return Outcome(self._said(name, rest))

    def _said(self, name: str, rest: str) -> str:
        if name == "/help":
            return _HELP
        if name == "/clear":
            self.turns.clear()
            self.pictures.clear()
            return "The conversation is forgotten."
        if name == "/set":
            return self.settings.set(rest)
        if name == "/system":
            return self._set_system(rest)
        if name == "/image":
            return self._attach(rest)
        if name == "/save":
            return self._save(rest)
        if name == "/load":
            return self._load(rest)
        found = closest(name, _NAMES, letters_per_edit=3)
        return f"unknown command {name}; " + (f"did you mean {found}?" if found else "/help lists the commands")

    def _ask_again(self, text: str, *, is_edit: bool) -> Outcome:
        """Takes the last prompt and what followed it out of the conversation."""
        place = next(
            (place for place in range(len(self.turns) - 1, -1, -1) if self.turns[place]["role"] == "user"), None
        )
        if place is None:
            return Outcome("There is no prompt yet.")
        prompt = self.turns[place]
        if is_edit and not text:
            return Outcome(edits=prompt)
        del self.turns[place:]
        return Outcome(asks=with_text(prompt, text) if text else prompt)

    def _set_system(self, text: str) -> str:
        if text:
            self.system = text
            return "The system prompt is set."
        return self.system or "There is no system prompt."

    def _attach(self, name: str) -> str:
        if not name:
            return "/image takes a file or an address"
        try:
            self.pictures.append(picture_part(name))
        except PictureError as error:
            return str(error)
        return f"With the next prompt: {len(self.pictures)} {'picture' if len(self.pictures) == 1 else 'pictures'}"

    def _save(self, name: str) -> str:
        if not name:
            return "/save takes a file to write to"
        path = Path(os.path.expanduser(name))  # Path's own raises where there is no such user
        text = json.dumps(self.messages(), indent=2, ensure_ascii=False) if path.suffix == ".json" else self._as_text()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            return f"{path} exists; choose another name"
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
        return f"Written: {path}"

    def _load(self, name: str) -> str:
        if not name:
            return "/load takes a file to read"
        path = Path(os.path.expanduser(name))
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        except ValueError:
            return f"{path} is not JSON: /save it under a name that ends with .json"
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            return f"{path} is not a list of messages, each with a role and its content"
        systems = [message["content"] for message in messages if message["role"] == "system"]
        self.turns = [message for message in messages if message["role"] != "system"]
        self.system = systems[0] if systems else self.system
        return f"{len(self.turns)} messages are read."

    def _as_text(self) -> str:
        return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in self.messages())


def text_of(message: Message) -> str:
    """What a message says, without its pictures."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def with_text(message: Message, text: str) -> Message:
    """The message with another text and its pictures."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": text}
    return {
        **message,
        "content": [*(part for part in content if part["type"] != "text"), {"type": "text", "text": text}],
    }


def _is_message(read: Any) -> bool:
    if not isinstance(read, dict) or read.get("role") not in (*_ROLES, "system"):
        return False
    content = read.get("content")
    if isinstance(content, list) and read["role"] != "system":
        return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    return isinstance(content, str)
