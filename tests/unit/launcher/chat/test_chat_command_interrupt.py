"""Ctrl-C while an answer comes."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from launcher.chat.client import ChatClient, Piece
from launcher.chat.command import _answer_at_terminal
from launcher.chat.conversation import Conversation, Message


class SilentClient(ChatClient):
    """Its answer begins, and nothing follows."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None, "m")

    async def answer(
        self, messages: Sequence[Message], sampling: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[Piece, None]:
        yield Piece("To be")
        # The signal reaches another thread, so that it does not interrupt the main thread's wait for the network.
        threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
        await asyncio.sleep(600)
        yield Piece(" or not to be")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A process that a shell has put into the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
def test_an_answer_stops_whichever_thread_gets_the_signal(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(None)
    _answer_at_terminal(SilentClient(), conversation, conversation.prompt("Hamlet"))
    assert "To be [stopped]" in capsys.readouterr().out
    assert conversation.messages(conversation.prompt("Go on"))[1] == {"role": "assistant", "content": "To be"}
