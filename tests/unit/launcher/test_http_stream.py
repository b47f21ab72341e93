from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable

import pytest
from support.scripted_http import ScriptedServer

from launcher.http_stream import BadAnswerError, Connection, reason_of, server_url


async def test_a_kept_connection_serves_the_next_request(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes]
) -> None:
    server.answers = [answer(b"one"), answer(b"two")]
    assert [await connection.get("/a"), await connection.get("/b")] == [b"one", b"two"]
    assert server.num_connections == 1
    assert b"x-name: value\r\n" in server.requests[1]


async def test_a_connection_closed_without_a_word_is_made_anew(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes]
) -> None:
    server.close_after_each = True
    server.answers = [answer(b"one"), answer(b"two")]
    assert [await connection.get("/a"), await connection.get("/b")] == [b"one", b"two"]
    assert server.num_connections == 2


async def test_chunks_arrive_as_one_body(
    server: ScriptedServer, connection: Connection, events: Callable[..., bytes]
) -> None:
    server.answers = [events(b"1", b"2")]
    assert b"".join([part async for part in connection.post("/x", b"{}")]) == b"data: 1\n\ndata: 2\n\n"
    assert server.requests[0].endswith(b"content-length: 2\r\n\r\n{}")


async def test_a_refusal_is_an_error_with_its_text(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes]
) -> None:
    server.answers = [answer(b'{"error":"too many"}', "429 Too Many Requests")]
    with pytest.raises(BadAnswerError, match=r"status 429.*too many"):
        await connection.get("/x")


@pytest.mark.parametrize(
    "raw",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", None, b"SMTP ready\r\n"],
    ids=["cut off", "no answer", "not http"],
)
async def test_a_broken_answer_is_an_error(server: ScriptedServer, connection: Connection, raw: bytes | None) -> None:
    server.close_after_each = True
    server.answers = [raw]
    with pytest.raises(BadAnswerError):
        await connection.get("/x")


@pytest.mark.parametrize("url", ["localhost:80", "ftp://host/", "http://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        Connection(url, {})


def test_a_user_name_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="--api-key") as caught:
        Connection("http://user:secret@host", {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("localhost:80", "http://localhost:80"),
        ("http://h/v1", "http://h"),
        ("https://h/base/v1/", "https://h/base"),
        ("http://h/", "http://h"),
        ("http://h/v1/chat/completions", "http://h"),
        ("ftp://h", "ftp://h"),
    ],
)
def test_urls_may_be_written_as_people_do(written: str, url: str) -> None:
    assert server_url(written) == url


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (TimeoutError(), "it takes too long"),
    ],
)
def test_why_no_server_answers(error: OSError, words: str) -> None:
    assert reason_of(error) == words


@pytest.mark.parametrize("reason", ["WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"])
def test_https_of_a_server_that_speaks_http(reason: str) -> None:
    error = ssl.SSLError(1, "of OpenSSL")
    error.reason = reason
    assert reason_of(error) == f"no TLS connection: {reason.replace('_', ' ').lower()}; is it http://?"
