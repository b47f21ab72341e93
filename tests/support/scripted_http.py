"""A server of a few lines that answers with what a test has prepared."""

from __future__ import annotations

import asyncio


class ScriptedServer:
    """Answers the n-th request of all connections with `answers[n]`, raw; None closes without a word."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.close_after_each = False
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if self.close_after_each:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
