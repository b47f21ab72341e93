"""Raw sockets: slow, large and broken requests, and what HTTP allows beyond what clients usually do."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
import uvloop
from router_fakes import Router, says, until

from router.api.http.connection import Bounds
from router.config import RouterConfig

MakeRouter = Callable[..., Router]
BODY = b'{"inputs":"x"}'
HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GOOD = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


async def talk(port: int, *pieces: bytes, pause_s: float = 0.0, timeout_s: float = 60.0) -> bytes:
    """Sends the pieces and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"x-long: " + b"a" * 1_000_000 + b"\r\n\r\n", 431),
        (HEAD + b"x-long: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (HEAD + b"".join(b"x-%d: 1\r\n" % index for index in range(20_000)) + b"\r\n", 431),
        (HEAD + b"".join(b"x-%d: %s\r\n" % (index, b"v" * 2000) for index in range(40)) + b"\r\n", 431),
        (b"GET /" + b"a" * 100_000, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400),
        (HEAD + b"content-length: -5\r\n\r\nhello", 400),
        (HEAD + b"x: a\rb\r\n\r\n", 400),
    ],
)
async def test_what_is_refused_at_the_door(router: Router, sent: bytes, status: int) -> None:
    async with router.listening() as port:
        answer = await talk(port, sent)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        assert b'{"error":' in answer and b"connection: close" in answer
        assert b"200 OK" in await talk(port, GOOD.replace(b"host: x", b"host: x\r\nconnection: close"))
    router.assert_idle()


@pytest.mark.parametrize("offer", [b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ", b"upgrade: websocket"])
@pytest.mark.parametrize("cut", [None, 30, 90])
async def test_an_offer_of_another_protocol_is_ignored(router: Router, offer: bytes, cut: int | None) -> None:
    first = GOOD.replace(b"host: x", b"host: x\r\nConnection: Upgrade, HTTP2-Settings\r\n" + offer)
    last = GOOD.replace(b"host: x", b"host: x\r\nconnection: close")
    async with router.listening() as port:
        answer = await talk(port, first[:cut], first[cut:] + last if cut else last, pause_s=0.05)
    assert answer.count(b"HTTP/1.1 200 OK") == 2, answer
    router.assert_idle()


async def test_a_body_behind_an_offer_is_never_a_request(router: Router) -> None:
    """Wherever the network cuts the head, and whatever the connection carried before."""
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    body = b"no JSON\r\n\r\nPOST /generate HTTP/1.1\r\nhost: x\r\n\r\n"
    first = HEAD + offer + b"content-length: %d\r\n\r\n" % len(body) + body
    in_chunks = HEAD + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    last = GOOD.replace(b"host: x", b"host: x\r\nconnection: close")

    def statuses(answer: bytes) -> list[bytes]:
        return [line[9:12] for line in answer.replace(b"}H", b"}\r\nH").split(b"\r\n") if line.startswith(b"HTTP/1.1")]

    async with router.listening() as port:
        for cut in range(len(HEAD) - 2, len(HEAD) + len(offer) + 3):
            assert statuses(await talk(port, first[:cut], first[cut:] + last, pause_s=0.002)) == [b"400", b"200"]
        for sent in (GOOD + first, GOOD + in_chunks):
            assert statuses(await talk(port, sent + last)) == [b"200", b"400", b"200"]
    router.assert_idle()


async def test_a_tunnel_is_refused(router: Router) -> None:
    async with router.listening() as port:
        for sent in (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", b"CONNECT /generate HTTP/1.1\r\nhost: x\r\n\r\n"):
            answer = await talk(port, sent + GOOD)
            assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1


async def test_a_head_that_does_not_come_in_time(router: Router) -> None:
    async with router.listening(Bounds(head_s=0.2)) as port:
        for pieces in ((b"",), (HEAD[:-5],), (HEAD, b"x: 1\r\n")):
            assert (await talk(port, *pieces)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_does_not_come_in_time(router: Router) -> None:
    async with router.listening(Bounds(body_s=0.2)) as port:
        assert (await talk(port, GOOD[:-3])).startswith(b"HTTP/1.1 408 ")
        chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\n{  \r\n"
        assert (await talk(port, chunked)).startswith(b"HTTP/1.1 408 ")
    router.assert_idle()


@pytest.mark.parametrize("sent", [GOOD[:-3], b"GET /info HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_what_arrived_while_the_loop_was_held_is_not_late(make_router: MakeRouter, sent: bytes) -> None:
    """On the loop that serves, whose timers run between two times of reading."""

    class Holder(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            client.sendall(GOOD.removeprefix(sent))
            time.sleep(2.1)

    async def exchange(port: int) -> bytes:
        loop = asyncio.get_running_loop()
        client.connect(("127.0.0.1", port))
        client.sendall(sent)
        await asyncio.sleep(0.1)
        if not GOOD.startswith(sent):
            assert b"200 OK" in await loop.run_in_executor(None, client.recv, 100_000)
        ours, theirs = socket.socketpair()
        with theirs:
            holding, _ = await loop.create_connection(Holder, sock=ours)
            theirs.send(b"x")
            client.setblocking(False)
            answer = await loop.sock_recv(client, 1000)
            holding.close()
        return answer

    async def served() -> bytes:
        async with make_router().listening(Bounds(head_s=2.0, body_s=2.0), keep_alive_s=2) as port:
            return await exchange(port)

    with socket.socket() as client:
        assert uvloop.run(served()).startswith(b"HTTP/1.1 200 OK")


async def test_slow_answers_are_not_cut(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [None])
    async with router.listening(Bounds(head_s=1.0, body_s=1.0)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 1.5)
        writer.close()
        await until(lambda: not router.scheduler.open)


async def test_too_many_connections(router: Router) -> None:
    async with router.listening(Bounds(max_connections=2)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: router.num_connections == 2)
        assert (await talk(port, b"")).startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()
        await until(lambda: router.num_connections == 0)
        assert b"200 OK" in await talk(port, GOOD.replace(b"host: x", b"host: x\r\nconnection: close"))


async def test_pipelined_and_kept_alive_requests(router: Router) -> None:
    async with router.listening() as port:
        last = GOOD.replace(b"host: x", b"host: x\r\nconnection: close")
        answer = await talk(port, GOOD + GOOD + last)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        answer = await talk(port, GOOD, GOOD, last, pause_s=0.1)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
    router.assert_idle()


async def test_many_requests_in_one_read_are_no_large_head(router: Router) -> None:
    large = b"x-filler: " + b"a" * 3000 + b"\r\n"
    one = b"GET /info HTTP/1.1\r\nhost: x\r\n" + large + b"\r\n"
    async with router.listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(one * 40 + one[:-4])
        await asyncio.sleep(0.2)
        writer.write(one[-4:])
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        # Not the number alone: it may be part of a request's random id.
        assert b"HTTP/1.1 431" not in answer and answer.count(b"HTTP/1.1 200") >= 1


async def test_a_flood_of_requests_on_one_connection_is_refused(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [None])
    async with router.listening() as port:
        answer = await talk(port, GOOD + b"GET /info HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)
        assert answer.startswith(b"HTTP/1.1 400 ")
        await until(lambda: not router.scheduler.open)
    router.assert_idle()


async def test_a_client_that_leaves_takes_its_pipelined_requests_along(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [None])
    async with router.listening() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD * 3)
        await until(lambda: bool(router.scheduler.open))
        writer.close()
        await until(lambda: not router.scheduler.open)
        assert len(router.scheduler.submitted) == 1
    router.assert_idle()


async def test_http_1_0_and_expect(router: Router) -> None:
    async with router.listening() as port:
        assert b" 200 OK" in await talk(port, GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head, _, body = GOOD.partition(b"\r\n\r\n")
        writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 100 ")
        writer.write(body)
        await reader.readline()
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_large_body_in_one_read_is_no_large_head(router: Router) -> None:
    body = b'{"inputs":"x","ignored":"' + b"a" * 200_000 + b'"}'
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with router.listening() as port:
        assert b"200 OK" in await talk(port, head + body)


async def test_the_answer_to_a_body_over_the_limit_arrives(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(payload_limit=1000))
    async with router.listening() as port:
        body = b" " * 3_000_000
        sent = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        last = b"GET /info HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await talk(port, sent + last)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"HTTP/1.1 200 OK" in answer


async def test_the_last_answer_arrives_while_its_body_is_still_being_sent(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(payload_limit=1000))
    async with router.listening() as port:
        for head in (HEAD.replace(b"1.1", b"1.0"), HEAD.replace(b"host: x", b"host: x\r\nconnection: close")):
            sent = [head + b"content-length: 3000000\r\n\r\n", *[b" " * 100_000] * 3]
            assert (await talk(port, *sent, pause_s=0.05)).startswith(b"HTTP/1.1 413 ")
        await until(lambda: router.num_connections == 0)
    router.assert_idle()


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_client_that_reads_nothing_loses_its_connection(make_router: MakeRouter, path: str) -> None:
    router = make_router(lambda request: says(*["x" * 100_000] * 200))
    async with router.listening(Bounds(stalled_s=0.3)) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            await asyncio.get_running_loop().run_in_executor(
                None, client.sendall, GOOD.replace(b"/generate", path.encode())
            )
            await until(lambda: router.num_connections == 1)
            await until(lambda: router.num_connections == 0)
    router.assert_idle()


async def test_a_client_that_reads_slowly_keeps_its_connection(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(*["x" * 100_000] * 60))
    async with router.listening(Bounds(stalled_s=1.5)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(GOOD.replace(b"host: x", b"host: x\r\nconnection: close"))
        answer = b""
        while piece := await asyncio.wait_for(reader.read(1_000_000), 60):
            answer += piece
            await asyncio.sleep(0.04)
        writer.close()
    assert answer.count(b"x") > 6_000_000


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET /info HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
        (b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY), BODY),
    ],
    ids=["an empty line", "the body of what is answered"],
)
async def test_an_idle_connection_is_closed_whatever_came_last(router: Router, pieces: tuple[bytes, bytes]) -> None:
    """uvicorn takes both for the beginning of a request and waits for ever."""
    async with router.listening(keep_alive_s=1) as port:
        answer = await talk(port, *pieces, pause_s=0.3)
        assert answer.count(b"HTTP/1.1 ") == 1
        await until(lambda: router.num_connections == 0)


async def test_who_waits_for_another_answer_is_not_late(make_router: MakeRouter) -> None:
    """Of a pipelined request nothing more is read; its clock must not end the answer that runs."""
    router = make_router(lambda request: [None])
    async with router.listening(Bounds(body_s=2.0)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD + GOOD[:-3])
        await until(lambda: bool(router.scheduler.open))
        await asyncio.sleep(3.8)  # nearly two of its clocks; a third begins with its turn
        router.scheduler.open[0].interrupt(says("end")[-1])
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.3)
        writer.write(GOOD[-3:])
        await until(lambda: len(router.scheduler.submitted) == 2)
        writer.close()
        await until(lambda: not router.scheduler.open)
    router.assert_idle()


async def test_the_last_bytes_of_a_closing_connection_must_be_read_too(router: Router) -> None:
    """However few they are: the transport waits for them."""

    class Unread:
        """A transport that has been closed, and whose client reads nothing."""

        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport
            self.is_closed = False

        def __getattr__(self, name: str) -> object:
            return getattr(self._transport, name)

        def get_write_buffer_size(self) -> int:
            return 10

        def is_closing(self) -> bool:
            return self.is_closed

        def close(self) -> None:
            self.is_closed = True

    async with router.listening(Bounds(stalled_s=0.2)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: router.num_connections == 1)
        [connection] = router.connections
        connection.transport = Unread(connection.transport)  # type: ignore[assignment]
        connection.shutdown()
        await until(lambda: router.num_connections == 0)
        writer.close()
