"""A batch that runs: its requests that have no answer yet, and the files of those that have one."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from router.api.batches.folder import BatchFolder
from router.api.batches.records import BatchRecord
from wire.batch_lines import Answers, Line, read_requests


@dataclass(frozen=True)
class Pending:
    """A request, and how often the server has failed it."""

    line: Line
    num_failures: int = 0


class Job:
    """Opened by `of`; to be closed."""

    def __init__(
        self, record: BatchRecord, requests: int, lines: Sequence[Line], answers: Answers, failures: Answers
    ) -> None:
        self.record = record
        self.running: dict[asyncio.Task[Pending | None], Pending] = {}
        self.not_before = 0.0
        """When the next request may be sent, in the loop's time."""
        self.is_ending = False
        done = answers.done | failures.done
        self.left = deque(Pending(line) for line in lines if line.custom_id not in done)
        record.num_requests = len(lines)
        record.num_answered, record.num_failed = len(answers.done), len(failures.done)
        self._requests = requests
        self._answers = answers
        self._failures = failures
        self._is_closed = False

    @classmethod
    def of(cls, record: BatchRecord, folder: BatchFolder, source: Path, most: int) -> Self:
        """Check the file, and open all. Raises FileError, OSError."""
        lines = read_requests(source, url=record.endpoint, most=most)
        known = frozenset(line.custom_id for line in lines)
        answers = Answers.open(folder.data(record.answers_id), known)
        try:
            failures = Answers.open(folder.data(record.failures_id), known, keeps_failures=True)
            try:
                return cls(record, os.open(source, os.O_RDONLY | os.O_CLOEXEC), lines, answers, failures)
            except BaseException:
                failures.close()
                raise
        except BaseException:
            answers.close()
            raise

    @property
    def is_done(self) -> bool:
        return not self.left and not self.running

    def body(self, line: Line) -> bytes:
        """Raises OSError."""
        row = orjson.loads(os.pread(self._requests, line.size, line.start))
        return orjson.dumps(row["body"])

    def answered(self, line: Line, response: dict[str, Any]) -> None:
        """Write an answer. Raises OSError."""
        is_ok = response["status_code"] == 200
        self._add(self._answers if is_ok else self._failures, line, response, None)
        if is_ok:
            self.record.num_answered += 1
        else:
            self.record.num_failed += 1

    def failed(self, line: Line, code: str, message: str) -> None:
        """Write why a request has no answer. Raises OSError."""
        self._add(self._failures, line, None, {"code": code, "message": message})
        self.record.num_failed += 1

    def _add(self, file: Answers, line: Line, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        name = f"batch_req_{uuid.uuid4().hex}"
        file.add({"id": name, "custom_id": line.custom_id, "response": response, "error": error})

    def sync(self) -> None:
        """Raises OSError."""
        if self._is_closed:
            return
        self._answers.sync()
        self._failures.sync()

    def expire(self) -> None:
        """Write that what is left came too late; may be called again. Raises OSError."""
        while self.left:
            self.failed(self.left[0].line, "batch_expired", "This request was not answered in the completion window.")
            self.left.popleft()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._requests)
        for file in (self._answers, self._failures):
            with suppress(OSError):  # `sync` has said it
                file.close()
