"""`launcher chat` in a pipe and at a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.running_server import RunningServer
from support.scripted_http import ScriptedServer

pytestmark = pytest.mark.e2e

LIMIT_S = 120
MARK = "1021"
"""A limit in tokens by which the processes of one server are known."""
COMMAND = [sys.executable, "-m", "launcher", "chat"]
GREEDY = ["--temperature", "0"]


def in_pipe(*arguments: str, prompts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *GREEDY, *arguments], input=prompts, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_a_pipe_gets_answers_and_nothing_else(server: RunningServer) -> None:
    done = in_pipe("--url", server.url, prompts="Hello! What is 2 plus 3?\n\nWhat is Tercet?\n")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "5" in first and second.startswith("Tercet is")


@pytest.mark.long
def test_a_model_is_served_as_long_as_the_chat_lasts() -> None:
    before = set(psutil.pids())
    done = in_pipe("demo", "--", "--max-total-tokens", MARK, prompts="What is Tercet?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Tercet is")
    left = [one for one in psutil.process_iter(["cmdline"]) if one.pid not in before]
    assert not [one for one in left if MARK in (one.info["cmdline"] or ())]


def test_closed_streams() -> None:
    script = f"exec 0<&-; {' '.join(COMMAND)}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: standard input or output is closed: a chat needs both\n"


def test_a_server_that_does_not_start_says_why() -> None:
    done = in_pipe("demo", "--", "--num-shard", "3", prompts="Hi\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: --num-shard 3 does not divide the model's 4 attention heads and 2 KV heads; use 1, 2 or 4\n"
    )


class Terminal:
    """A chat whose standard streams are a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        # A session of its own whose terminal this is: that is where Ctrl-C goes. What a shell has put into the
        # background ignores it, and so would the chat.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "env", "--default-signal=INT", *COMMAND, *GREEDY, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, words: str) -> str:
        """What is shown from here on, up to these words."""
        shown, deadline = "", time.monotonic() + LIMIT_S
        while words not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([self._ours], [], [], 1.0)[0]:
                try:
                    shown += os.read(self._ours, 1).decode(errors="replace")
                except OSError:  # Linux: nobody has the other end any more
                    raise AssertionError(f"ended after {shown!r}") from None
        return shown

    def end(self) -> int:
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        os.close(self._ours)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    shown = Terminal(*arguments)
    try:
        yield shown
    finally:
        if shown.process.poll() is None:
            shown.process.send_signal(signal.SIGKILL)
            shown.process.wait()
        shown.close()


def test_a_conversation(server: RunningServer, tmp_path: Path) -> None:
    with terminal("--url", server.url) as chat:
        assert f"demo at {server.url}. /help lists" in chat.until("> ")
        chat.type("What is Tercet?\n")
        assert "\nTercet is" in chat.until("\n> ")
        chat.type("/sytem\n")
        assert "did you mean /system?" in chat.until("\n> ")
        chat.type("Hello! \\\n")
        chat.until("\n  ")
        chat.type("What is 2 plus 3?\n")
        assert "5" in chat.until("\n> ")
        chat.type("/set max_tokens 2\n")
        chat.until("max_tokens 2")
        chat.until("\n> ")
        chat.type("/retry\n")
        assert "[cut: the answer has reached its maximum length]\r\n[2 tokens, " in chat.until("\n> ")
        chat.type("/set max_tokens\n")
        chat.until("\n> ")
        chat.type("/edit Hello! What is 2 plus 3?\n")
        assert "tokens/s, first after" in chat.until("\n> ")
        chat.type(f"/save {tmp_path}/chat.txt\n")
        chat.until("Written")
        chat.until("> ")
        chat.type("/exit\n")
        assert chat.end() == 0
    text = (tmp_path / "chat.txt").read_text()
    assert text.startswith("user: What is Tercet?\n\nassistant: Tercet is")
    assert "user: Hello! What is 2 plus 3?\n\nassistant: " in text


async def test_ctrl_c_stops_an_answer() -> None:
    """The connection ends with it, and the chat goes on."""
    half = b'data: {"choices": [{"delta": {"content": "to be \\u001b[2J or "}}]}\n\n'
    start = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + f"{len(half):x}\r\n".encode() + half + b"\r\n"
    scripted = ScriptedServer()
    scripted.answers = [start, b'HTTP/1.1 400 Bad\r\ncontent-length: 19\r\n\r\n{"error": "enough"}']
    listening = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    def talk() -> int:
        with terminal("--url", url, "--model", "m") as chat:
            chat.until("> ")
            chat.type("Hamlet\n")
            # What a model says does not steer the terminal.
            assert "to be \\x1b[2J or " in chat.until("or ")
            chat.type("\x03")
            assert "[stopped]" in chat.until("\n> ")
            chat.type("Go on\n")
            assert "error: enough" in chat.until("\n> ")
            chat.type("\x04")
            return chat.end()

    async with listening:
        assert await asyncio.to_thread(talk) == 0
    # What came of the answer is part of the conversation.
    assert b'{"role":"assistant","content":"to be \\u001b[2J or "}' in scripted.requests[1]
