"""Bodies of `/v1/files` and `/v1/batches`, as OpenAI has them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from router.api.batches.records import LONGEST_S, Purpose, Status, window_s
from router.errors import FieldError
from router.schemas.base import Body
from wire.batch_lines import URLS

_SHORTEST_S = 3600
_MOST_METADATA, _LONGEST_NAME, _LONGEST_TEXT = 16, 64, 512


class ExpiresAfter(Body):
    """When a file is removed."""

    anchor: Literal["created_at"] = Field(description="What the seconds are counted from.", examples=["created_at"])
    seconds: int = Field(ge=_SHORTEST_S, le=LONGEST_S, description="From one hour to 30 days.", examples=[86400])


class BatchBody(Body):
    """A batch to begin."""

    input_file_id: str = Field(description="Of a file of requests.", examples=["file-0123456789abcdef"])
    endpoint: str = Field(description="The `url` of all its requests.", examples=["/v1/chat/completions"])
    completion_window: str = Field(
        description="Time for all requests, in hours or days, 30 days at most; OpenAI's is `24h`.", examples=["24h"]
    )
    metadata: dict[str, str] = Field(
        default_factory=dict, description="Texts that the batch shows.", examples=[{"job": "nightly"}]
    )
    output_expires_after: ExpiresAfter | None = Field(
        default=None,
        description="When the files of answers are removed. Default: 30 days after they are there.",
        examples=[{"anchor": "created_at", "seconds": 86400}],
    )

    @model_validator(mode="after")
    def _is_served(self) -> BatchBody:
        if self.endpoint not in URLS:
            raise FieldError(f"`endpoint` must be one of {', '.join(URLS)}", param="endpoint")
        if window_s(self.completion_window) is None:
            text = "`completion_window` must be a number of hours or days, like 24h, of at most 30 days"
            raise FieldError(text, param="completion_window")
        if len(self.metadata) > _MOST_METADATA or any(
            len(name) > _LONGEST_NAME or len(text) > _LONGEST_TEXT for name, text in self.metadata.items()
        ):
            text = f"`metadata` may hold {_MOST_METADATA} texts of {_LONGEST_TEXT} characters, names of {_LONGEST_NAME}"
            raise FieldError(text, param="metadata")
        return self


class FileObject(BaseModel):
    """A file that is kept."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFaults(BaseModel):
    """What is wrong with a batch's file."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class RequestCounts(BaseModel):
    """How far a batch is."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch, and how far it is; moments are Unix times."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
