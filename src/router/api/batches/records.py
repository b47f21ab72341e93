"""What is known of a file and of a batch, as the disk has it."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
Ended = Literal["completed", "expired", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
_SECONDS = {"h": 3600, "d": 86400}
LONGEST_S = 30 * _SECONDS["d"]
"""Of a file's life, and of a batch's window."""
_WINDOW = re.compile(r"([1-9]\d{0,2})([hd])")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of requests, or of answers."""

    id: str
    owner: str
    """Name of an API key; empty where there are none."""
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: int
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(kw_only=True)
class BatchRecord:
    """A batch, changed by `router.api.batches.service` alone."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str]
    output_life_s: int
    created_at: int
    expires_at: int
    answers_id: str
    """Of the file of answers; `failures_id`: of the requests that got none. They are files once the batch has ended."""
    failures_id: str
    status: Status = "validating"
    moments: dict[str, int] = field(default_factory=dict)
    """When it came to a status."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Of its file."""
    blocked: str = ""
    """Why it cannot continue now."""
    num_requests: int = 0
    num_answered: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def written_ids(self) -> tuple[str, str]:
        return self.answers_id, self.failures_id

    def enter(self, status: Status) -> None:
        self.status = status
        self.moments[status] = int(time.time())

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        faults = self.faults or ([fault("insufficient_storage", self.blocked)] if self.blocked else [])
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.moments.get(name) for name in moments},
            "request_counts": {
                "total": self.num_requests,
                "completed": self.num_answered,
                "failed": self.num_failed,
            },
            "metadata": self.metadata or None,
        }


def fault(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    """Return OpenAI's object for what is wrong with a batch."""
    return {"code": code, "message": message, "param": param, "line": line}


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


def window_s(text: str) -> int | None:
    """Return the seconds of a completion window; None: it is none."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    return seconds if 0 < seconds <= LONGEST_S else None
