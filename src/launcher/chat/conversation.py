"""The messages so far, and the commands that change them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from wire.cli.spelling import closest

COMMANDS = {
    "/help": "list the commands",
    "/system [TEXT]": "set the system prompt; without TEXT, show it",
    "/clear": "forget the conversation, but not the system prompt",
    "/save FILE": "write the conversation, as JSON if FILE ends with .json",
    "/exit": "end the chat; so does Ctrl-D",
}
_NAMES = [usage.split()[0] for usage in COMMANDS]
_HELP = "\n".join(
    [
        *(f"{usage:<16}{meaning}" for usage, meaning in COMMANDS.items()),
        "Ctrl-C stops an answer; at an empty prompt it ends the chat. A prompt that begins with / is written with //.",
        "A \\ at the end of a line continues the prompt on the next one.",
    ]
)

Message = dict[str, str]


class ChatEndedError(Exception):
    """The user has asked for the end."""


@dataclass
class Conversation:
    """`turns`: user and assistant in turn, oldest first."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self, prompt: str | None = None) -> list[Message]:
        """All of them, and a prompt that has no answer yet."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, *self.turns, *([] if prompt is None else [{"role": "user", "content": prompt}])]

    def add(self, prompt: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    def obey(self, line: str) -> str:
        """Does what a line that begins with `/` says; returns what is to be shown. Raises ChatEndedError."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/system":
            return self._set_system(rest)
        if name == "/save":
            return self._save(rest)
        if name in _NAMES and rest:
            return f"{name} takes nothing else"
        if name == "/exit":
            raise ChatEndedError
        if name == "/clear":
            self.turns.clear()
            return "The conversation is forgotten."
        if name == "/help":
            return _HELP
        found = closest(name, _NAMES, letters_per_edit=3)
        return f"unknown command {name}; " + (f"did you mean {found}?" if found else "/help lists the commands")

    def _set_system(self, text: str) -> str:
        if text:
            self.system = text
            return "The system prompt is set."
        return self.system or "There is no system prompt."

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

    def _as_text(self) -> str:
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages())
