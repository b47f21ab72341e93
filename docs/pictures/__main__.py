"""`python -m docs.pictures [PORT]` makes the pictures of terminals in docs/images, with tmux and the demo model.

A terminal shows the real output of a program: tmux is the terminal, and rich writes what is on it as SVG.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parents[1] / "images"
LAUNCHER = Path(sys.executable).with_name("launcher")
NAME = "tercet-pictures"
WIDTH, HEIGHT = 110, 40
LIMIT_S = 120
PORT = sys.argv[1] if len(sys.argv) > 1 else "8080"
URL = f"http://127.0.0.1:{PORT}"
# rich's SVG loads its font from the internet; a reader's own has to do.
_FONT = re.compile(r"@font-face \{.*?\}", re.S)


@contextmanager
def terminal(command: str) -> Iterator[str]:
    """A terminal in which `command`, a command line of the launcher, runs. Yields its name in tmux."""
    name = f"{NAME}-{command.split()[1]}"
    program = f"{shlex.quote(str(LAUNCHER))} {command.removeprefix('launcher ')}"
    _tmux("new-session", "-d", "-s", name, "-x", str(WIDTH), "-y", str(HEIGHT), f"{program}; sleep {LIMIT_S}")
    try:
        yield name
    finally:
        _tmux("send-keys", "-t", name, "C-c")
        time.sleep(2)  # the launcher ends its children
        with suppress(subprocess.CalledProcessError):  # Ctrl-C has ended it
            _tmux("kill-session", "-t", name)


def wait_for(name: str, pattern: str, count: int = 1) -> None:
    """Until the terminal shows `pattern` `count` times."""
    until = time.monotonic() + LIMIT_S
    while len(re.findall(pattern, _screen(name))) < count:
        if time.monotonic() > until:
            sys.exit(f"{name}: no {pattern!r} in\n{_screen(name)}")
        time.sleep(0.2)


def save(name: str, command: str, picture: str) -> None:
    """What is on the terminal, below the command that a reader would type, as docs/images/`picture`.svg."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(f"[bold]$ {command}[/bold]", highlight=False)
    console.print(Text.from_ansi(_screen(name, "-e").rstrip()))
    svg = _FONT.sub("", console.export_svg(title="", unique_id=picture))
    (IMAGES / f"{picture}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n")


def _screen(name: str, *options: str) -> str:
    return _tmux("capture-pane", "-p", "-t", name, *options)


def _type(name: str, text: str) -> None:
    _tmux("send-keys", "-t", name, "-l", text)
    _tmux("send-keys", "-t", name, "Enter")


def _tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", "-L", NAME, *arguments], check=True, capture_output=True, text=True).stdout


def picture_of(command: str, last_words: str, picture: str) -> None:
    """Of a command that ends by itself, when it has said its last words."""
    with terminal(command) as name:
        wait_for(name, last_words)
        save(name, command, picture)


def main() -> None:
    picture_of(f"launcher doctor --port {PORT}", "This machine", "terminal-doctor")
    picture_of("launcher estimate demo --memory 24GiB", "--kv-cache-dtype", "terminal-estimate")
    serve = f"launcher serve demo --port {PORT} --hostname 127.0.0.1"
    chat = f"launcher chat --url {URL}"
    with terminal(serve) as server:
        wait_for(server, "curl")
        subprocess.run(["curl", "-s", f"{URL}/v1/models"], check=True, capture_output=True)
        with terminal(chat) as client:
            wait_for(client, "/help lists")
            for number, question in enumerate(("Hello! What is 2 plus 3?", "Explain how Tercet works."), 1):
                _type(client, question)
                wait_for(server, "chat/completions", number)
            time.sleep(1)
            save(client, chat, "terminal-chat")
        save(server, serve, "terminal-serve")


if __name__ == "__main__":
    main()
