"""Bytes on the socket that no HTTP client would write: each sound request is answered once, the others with 4xx."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter

from hostile.answers import check_error
from hostile.punctual import ARRIVAL_S
from hostile.target import ANSWER_LIMIT_S, Target
from support.raw_http import generation, post, status_of, talk

AT_ONCE = 16
_WRONG = {0, 400, 401, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 501}
"""0 is a connection that was closed, as is right when no request was understood."""


async def raw_bytes(target: Target, source: random.Random, count: int) -> Counter[str]:
    """Damaged heads, broken chunks, pipelines and bytes that come one at a time, in turn."""
    seen: Counter[str] = Counter()
    kinds = (_damaged, _chunked, _pipelined, _dripped)

    async def one(index: int, own: random.Random) -> None:
        seen.update(await kinds[index % len(kinds)](target, own))

    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(one(first + index, random.Random(source.random())) for index in range(AT_ONCE)))
    return seen


async def _damaged(target: Target, source: random.Random) -> list[str]:
    """Some bytes of a sound request are others."""
    sent = bytearray(_sound(target, last=True))
    for _ in range(source.randint(1, 6)):
        sent[source.randrange(len(sent))] = source.randrange(256)
    return [_checked(await talk(target.port, bytes(sent)), sent)]


async def _chunked(target: Target, source: random.Random) -> list[str]:
    """A body in chunks whose sizes are wrong, endless, negative or no numbers."""
    head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    head += target.raw_headers + "transfer-encoding: chunked\r\n\r\n"
    size = source.choice(["2", "-1", "zz", "f" * 20, "0x2", "2;" + "a" * source.randint(0, 9999), " 2", "2 ", ""])
    sent = f"{head}{size}\r\n{{}}\r\n0\r\n{source.choice(['', 'x: 1', 'a' * 70_000])}\r\n\r\n".encode()
    return [_checked(await talk(target.port, sent), sent)]


async def _pipelined(target: Target, source: random.Random) -> list[str]:
    """Several requests at once on one connection: as many answers, in order."""
    number = source.randint(2, 8)
    sent = b"".join(_sound(target, last=index == number - 1) for index in range(number))
    cut = source.randint(1, len(sent) - 1)
    answer = await _punctual(target, [sent[:cut], sent[cut:]])
    statuses = [int(piece[:3]) for piece in answer.split(b"HTTP/1.1 ")[1:]]
    assert len(statuses) == number and set(statuses) <= {200, 429}, (statuses, number)
    return [str(status) for status in statuses]


async def _dripped(target: Target, source: random.Random) -> list[str]:
    """Slowly, but in time."""
    sent = _sound(target, last=True)
    cuts = sorted(source.sample(range(1, len(sent)), 4))
    pieces = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    status = status_of(answer := await _punctual(target, pieces, source.uniform(0, 0.05)))
    assert status in (200, 429), answer[:300]
    return [str(status)]


async def _punctual(target: Target, pieces: list[bytes], pause_s: float = 0.0) -> bytes:
    """Send the pieces and read to the end; anew if this machine took longer to send them than the server waits."""
    while True:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause_s)
            is_late = time.monotonic() - began >= ARRIVAL_S
            answer = await asyncio.wait_for(reader.read(), ANSWER_LIMIT_S)
        except ConnectionError:
            is_late, answer = time.monotonic() - began >= ARRIVAL_S, b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if not is_late:
            return answer


def _sound(target: Target, *, last: bool) -> bytes:
    return post("/generate", generation(2, "x"), last=last, headers=target.raw_headers)


def _checked(answer: bytes, sent: bytes | bytearray) -> str:
    status = status_of(answer)
    assert status in {200, *_WRONG}, (bytes(sent)[:500], answer[:300])
    head, _, body = answer.partition(b"\r\n\r\n")
    if status in _WRONG and b"application/json" in head and b"chunked" not in head:
        check_error(body.decode())
    return str(status)
