"""`launcher chat`: at a terminal a conversation, in a pipe an answer to each line."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing

import uvloop
from rich.console import Console
from rich.text import Text

from launcher.chat import prompt
from launcher.chat.client import ChatClient, ChatError
from launcher.chat.config import DEFAULT_URL, ChatConfig
from launcher.chat.conversation import ChatEndedError, Conversation, Message, text_of
from launcher.chat.display import Display, MarkdownDisplay, PlainDisplay
from launcher.chat.server import Server, served
from launcher.chat.settings import DEFAULTS, Settings
from wire.text.escape import as_error, escape, one_line

_SPINNER_WIDTH = 3


def run_chat(config: ChatConfig, environ: Mapping[str, str]) -> int:
    """Chat and return the exit status: 1 for an error, 130 when interrupted."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # no text of a model or a file may end the chat
            stream.reconfigure(errors="replace")
    try:
        _check(config)
        with _server_of(config, environ) as server:
            try:
                _chat(config, server)
            except ChatError as error:
                raise ChatError(server.failure() or str(error)) from None
    except ChatError as error:
        sys.stderr.write(as_error(str(error)) + "\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # A reader that has seen enough (`| head`) is no error; the interpreter's own flush would be the next.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _chat(config: ChatConfig, server: Server) -> None:
    """Raises ChatError."""
    client = ChatClient(server.url, config.api_key, config.model)
    model = uvloop.run(client.greet())
    conversation = Conversation(config.system, settings=Settings(config.sampling))
    if client.info.get("has_chat_template") and not client.info.get("sampling_defaults"):
        conversation.settings.defaults = dict(DEFAULTS)
    if sys.stdin.isatty() and sys.stdout.isatty():
        _talk(server, client, conversation, model)
    else:
        _answer_lines(client, conversation)


def _check(config: ChatConfig) -> None:
    """Raises ChatError."""
    if config.url is not None and (config.model_id is not None or config.server_options):
        raise ChatError("--url names a server that runs already: leave out MODEL and the options after --")
    if sys.stdin is None or sys.stdout is None:
        raise ChatError("standard input or output is closed: a chat needs both")
    if config.model_id == "":
        raise ChatError("MODEL is empty")


@contextlib.contextmanager
def _server_of(config: ChatConfig, environ: Mapping[str, str]) -> Iterator[Server]:
    """The one that runs already, or one that runs as long as the block does. Raises ChatError."""
    if config.model_id is None:
        yield Server(config.url or DEFAULT_URL)
        return
    key = {} if config.api_key is None else {"API_KEY": config.api_key}
    title = f"Starting {config.model_id}"
    with contextlib.ExitStack() as stack:
        console = Console(stderr=True)
        with console.status(Text(title)) as status:

            def show(said: str) -> None:
                line = Text(one_line(f"{title}: {said}" if said else title))
                line.truncate(console.width - _SPINNER_WIDTH, overflow="ellipsis")
                status.update(line)

            server = stack.enter_context(served(config.model_id, config.server_options, {**environ, **key}, show))
        yield server


def _talk(server: Server, client: ChatClient, conversation: Conversation, model: str) -> None:
    """Raises ChatError if a server of our own has ended."""
    _say(f"{model} at {client.url}. /help lists the commands, Ctrl-D ends the chat.")
    if defaults := conversation.settings.defaults:
        values = ", ".join(f"{name} {value}" for name, value in defaults.items())
        _say(f"Sampling: {values} (the model brings none); /set changes it.")
    while True:
        before = list(conversation.turns)
        try:
            line = prompt.ask()
            if line.split(" ")[0] == "/model":
                _say(uvloop.run(client.switch(line.removeprefix("/model").strip())))
                continue
            if line.startswith("/") and not line.startswith("//"):
                asked = _obey(conversation, line)
            else:
                asked = conversation.prompt(line.removeprefix("/") if line.startswith("//") else line) if line else None
            if asked is not None and not _answer_at_terminal(client, conversation, asked):
                conversation.turns = before
        except ChatEndedError:
            return
        except ChatError as error:
            conversation.turns = before
            if server.failure() is not None:
                raise
            # Mostly the conversation has outgrown the model.
            hint = "; /clear forgets the conversation" if conversation.turns and "tokens" in str(error) else ""
            _say(as_error(str(error)) + hint + "\n")


def _obey(conversation: Conversation, line: str) -> Message | None:
    """The prompt that a command wants to be answered. Raises ChatEndedError."""
    outcome = conversation.obey(line)
    if outcome.said:
        _say(outcome.said)
    if outcome.edits is not None:
        text = prompt.ask(text_of(outcome.edits))
        return conversation.obey(f"/edit {text}").asks if text else None
    return outcome.asks


def _answer_at_terminal(client: ChatClient, conversation: Conversation, asked: Message) -> bool:
    """Answer, and keep what came before Ctrl-C; drop a prompt without any answer and return False."""
    parts: list[str] = []
    ending = ""
    console = Console()
    is_plain = console.is_dumb_terminal or not console.is_terminal
    display: Display = (
        MarkdownDisplay(console)
        if conversation.settings.renders_markdown and not is_plain
        else PlainDisplay(shows_reasoning=True, dims=not is_plain)
    )
    try:
        uvloop.run(_show_answer(client, conversation, asked, parts, display))
    except KeyboardInterrupt:
        ending = " [stopped]"
    except ChatError:
        sys.stdout.write("\n" if parts else "")
        raise
    if parts:
        conversation.add(asked, "".join(parts))
    if client.figures.was_cut:
        ending = " [cut: the answer has reached its maximum length]"
    figures = f"[{client.figures}]" if str(client.figures) else ""
    if isinstance(display, PlainDisplay):
        _say(f"{ending}\n{figures}\n" if figures else f"{ending}\n")
    else:
        console.print(Text(f"{figures}{ending}".strip(), style="dim"), end="\n\n")
    return bool(parts)


def _answer_lines(client: ChatClient, conversation: Conversation) -> None:
    """Each line of standard input is a prompt. Raises ChatError at the first that gets no answer."""
    for line in sys.stdin:
        if not (text := line.strip()):
            continue
        parts: list[str] = []
        asked = conversation.prompt(text)
        display = PlainDisplay(shows_reasoning=False, dims=False)
        uvloop.run(_show_answer(client, conversation, asked, parts, display))
        _say("")
        conversation.add(asked, "".join(parts))


async def _show_answer(
    client: ChatClient, conversation: Conversation, asked: Message, parts: list[str], display: Display
) -> None:
    """Shows the answer as it comes, and adds its pieces to `parts`. Raises ChatError."""
    with display:
        async with aclosing(client.answer(conversation.messages(asked), conversation.settings.sampling)) as answer:
            async for piece in answer:
                if not piece.is_reasoning:
                    parts.append(piece.text)
                display.show(piece)


def _say(line: str) -> None:
    sys.stdout.write(escape(line) + "\n")
    sys.stdout.flush()
