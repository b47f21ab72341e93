"""Sends a batch's requests, and writes their answers as they end."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from launcher.http_stream import BadAnswerError, Connection, reason_of
from wire.batch_lines import Answers, Line

_CONCURRENCY = 16
"""Of servers that do not say how many requests they take."""
_MOST = 512  # connections, whatever the server takes
_LONGEST_PAUSE_S, _LONGEST_ASKED_S = 30.0, 3600.0
_SYNC_EVERY_S = 1.0
_OK, _LIMITED, _FAILED = 200, 429, 500


class UnreachableError(Exception):
    """The server answers nothing any more: a later run continues."""


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How requests are sent."""

    url: str
    headers: Mapping[str, str]
    concurrency: int | None
    retries: int
    timeout_s: float


class Batch:
    """One run over the requests that have no answer yet."""

    def __init__(self, requests: int, lines: Iterator[Line], answers: Answers, sending: Sending) -> None:
        """requests: Descriptor of the file that `lines` are of."""
        self.num_answered = self.num_failed = 0
        self._requests = requests
        self._lines = lines
        self._answers = answers
        self._sending = sending

    async def run(self) -> None:
        """Answer all. Raises UnreachableError, OSError for a full disk."""
        concurrency = await self._concurrency()
        syncing = asyncio.create_task(self._sync())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            syncing.cancel()

    async def _concurrency(self) -> int:
        """Ask a server of ours how many it takes, and any whether it is there."""
        sending = self._sending
        connection = self._connection()
        try:
            async with asyncio.timeout(min(sending.timeout_s, 60)):
                info = orjson.loads(await connection.get("/info"))
            found = info.get("max_concurrent_requests") if isinstance(info, dict) else None
        except (BadAnswerError, orjson.JSONDecodeError):
            found = None
        except OSError as error:
            raise UnreachableError(f"no server answers at {sending.url}: {reason_of(error)}") from None
        finally:
            connection.close()
        if sending.concurrency is not None:
            return sending.concurrency
        return min(found, _MOST) if isinstance(found, int) and found > 0 else _CONCURRENCY

    def _connection(self) -> Connection:
        return Connection(self._sending.url, self._sending.headers)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_EVERY_S)
            await asyncio.to_thread(self._answers.sync)

    async def _work(self) -> None:
        connection = self._connection()
        try:
            for line in self._lines:
                request = orjson.loads(os.pread(self._requests, line.size, line.start))
                response, error = await self._answer(connection, request["url"], orjson.dumps(request["body"]))
                is_answered = response is not None and response["status_code"] == _OK
                self.num_answered += is_answered
                self.num_failed += not is_answered
                name = f"batch_req_{uuid.uuid4().hex}"
                self._answers.add({"id": name, "custom_id": line.custom_id, "response": response, "error": error})
        finally:
            connection.close()

    async def _answer(
        self, connection: Connection, url: str, body: bytes
    ) -> tuple[dict[str, Any] | None, dict[str, str] | None]:
        """Return a request's last answer, or why there is none."""
        num_failures = 0
        while True:
            status, text, failure = await self._once(connection, url, body)
            if status == _LIMITED:
                await asyncio.sleep(_pause_s(connection, 1))
                continue
            num_failures += 1
            if 0 < status < _FAILED or num_failures > self._sending.retries:
                break
            await asyncio.sleep(_pause_s(connection, num_failures))
        if not status and isinstance(failure, OSError) and not isinstance(failure, TimeoutError):
            raise UnreachableError(f"the server at {self._sending.url} does not answer any more: {reason_of(failure)}")
        if not status:
            code = "request_timeout" if isinstance(failure, TimeoutError) else "no_answer"
            return None, {"code": code, "message": str(failure) or f"no answer in {self._sending.timeout_s:g} s"}
        request_id = connection.headers.get("x-request-id", "")
        return {"status_code": status, "request_id": request_id, "body": _json(text)}, None

    async def _once(self, connection: Connection, url: str, body: bytes) -> tuple[int, bytes, Exception | None]:
        """Return the status and the body; 0 with what was in the way of an answer."""
        try:
            async with asyncio.timeout(self._sending.timeout_s):
                return _OK, b"".join([part async for part in connection.post(url, body)]), None
        except BadAnswerError as error:
            return error.status or 0, error.body.encode(), error
        except OSError as error:  # a timeout is one
            connection.close()
            return 0, b"", error


def _pause_s(connection: Connection, num_failures: int) -> float:
    """Return how long to wait: what the server says, else longer each time."""
    with suppress(ValueError):
        return min(max(float(connection.headers.get("retry-after", "")), 0.1), _LONGEST_ASKED_S)
    return min(2.0 ** (num_failures - 1), _LONGEST_PAUSE_S)


def _json(text: bytes) -> Any:
    """Return a body; one that is not JSON as its text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode(errors="replace")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
