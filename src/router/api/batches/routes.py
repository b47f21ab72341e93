"""`/v1/files` and `/v1/batches`, OpenAI's Batch API."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import FileResponse, Response

from router.api.batches.records import (
    ENDED,
    LONGEST_S,
    BatchRecord,
    FileRecord,
    new_batch_id,
    new_file_id,
    window_s,
)
from router.api.batches.schema import (
    BatchBody,
    BatchList,
    BatchObject,
    DeletedFile,
    ExpiresAfter,
    FileList,
    FileObject,
)
from router.api.batches.service import Batches
from router.api.batches.upload import Form, boundary_of, read_form
from router.api.errors import BodyError, NotServedError
from router.api.http.body import LARGE_BODY, LargeBodies, read_body
from router.api.json_out import JsonResponse
from router.api.openai.pages import page_of
from router.api.routes import Routes
from router.errors import ValidationError
from router.generation.parsed_bodies import ParsedBodies
from router.schemas.errors import OpenAIError
from router.tracing import entered
from router.worker.lane import Lane

logger = logging.getLogger(__name__)

routes = Routes("Batches")
routes.models += [ExpiresAfter]

Record = TypeVar("Record", FileRecord, BatchRecord)

_FILES, _BATCHES = "/v1/files", "/v1/batches"
_FILE, _BATCH = _FILES + "/{file_id}", _BATCHES + "/{batch_id}"
_MOST_FILES, _MOST_BATCHES, _USUAL_BATCHES = 10_000, 100, 20
_SHORTEST_S = 3600
_FORM_OVERHEAD = 64 << 10  # of a form beside its file
_LARGE = LargeBodies(Lane("batches"), ParsedBodies())  # bodies are below what goes there
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": OpenAIError, "description": "The request lacks the server's API key"},
    404: {"model": OpenAIError, "description": "There is none with this id"},
}
_REFUSED_FORM: dict[int | str, dict[str, Any]] = {
    400: {"model": OpenAIError, "description": "The form is not right"},
    401: {"model": OpenAIError, "description": "The request lacks the server's API key"},
    413: {"model": OpenAIError, "description": "The file is too large, or no room is left"},
    415: {"model": OpenAIError, "description": "The body is no form"},
    507: {"model": OpenAIError, "description": "The disk is full"},
}
_FORM_SCHEMA = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Lines of JSON, each a request."},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer", "minimum": _SHORTEST_S, "maximum": LONGEST_S,
            "description": "After which time the file is removed. Default: 30 days.",
        },
    },
}  # fmt: skip


@routes.post(
    _FILES,
    response_model=FileObject,
    responses=_REFUSED_FORM,
    openapi_extra={
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM_SCHEMA}}},
        "security": [{}, {"bearer": []}],
    },
)
async def upload(request: Request) -> Response:
    """Keep a file of requests for a batch. Its lines are checked when a batch is made of it."""
    batches, owner, file_id = _batches(request), _owner(), new_file_id()
    boundary = boundary_of(request.headers.get("content-type", ""))
    path = batches.folder.incoming(file_id)
    try:
        with _writing(batches), path.open("xb") as file:
            form = await read_form(_bounded(request, batches), boundary, file.write)
            size = file.tell()
        life_s = _life_s(form)
        if size > batches.limits.file_size:
            raise _too_large(batches)
        if batches.folder.owned_bytes(owner) + size > batches.limits.storage:
            text = f"files may take {batches.limits.storage} bytes in all (`--batch-storage`): delete some first"
            raise BodyError(413, "payload_too_large", text, reason="body_too_large", param="file")
        now = int(time.time())
        record = FileRecord(
            id=file_id,
            owner=owner,
            filename=form.filename or "",
            purpose="batch",
            num_bytes=size,
            created_at=now,
            expires_at=now + life_s,
        )
        with _writing(batches):
            await batches.add_file(record)
    finally:
        path.unlink(missing_ok=True)
    return JsonResponse(record.shown())


@contextmanager
def _writing(batches: Batches) -> Iterator[None]:
    """Say that the disk is full. Raises BodyError; OSError for any other fault of the disk."""
    try:
        yield
    except OSError as error:
        logger.error("--batch-dir: %s", error.strerror)
        if not batches.count_error(error):
            raise
        text = "the server's disk for batches is full: nothing of this is kept"
        raise BodyError(507, "insufficient_storage", text, reason="disk_full") from None


async def _bounded(request: Request, batches: Batches) -> AsyncIterator[bytes]:
    """Yield the body. Raises BodyError once it is larger than any form with a file may be."""
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > batches.limits.file_size + _FORM_OVERHEAD:
            raise _too_large(batches)
        yield piece


def _too_large(batches: Batches) -> BodyError:
    text = f"the file must not exceed {batches.limits.file_size} bytes (`--batch-file-size`)"
    return BodyError(413, "payload_too_large", text, reason="body_too_large", param="file")


def _life_s(form: Form) -> int:
    """Check a form, and return for how long its file is kept. Raises ValidationError."""
    if form.filename is None:
        raise ValidationError("missing field `file`", param="file", reason="missing_field")
    fields = dict(form.fields)
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise ValidationError("missing field `purpose`", param="purpose", reason="missing_field")
    if purpose != "batch":
        text = "`purpose` must be batch: files are kept for /v1/batches alone"
        raise ValidationError(text, param="purpose")
    anchor = fields.pop("expires_after[anchor]", "created_at")
    seconds = fields.pop("expires_after[seconds]", str(LONGEST_S))
    if fields:
        name = min(fields)[:80]
        raise ValidationError(f"unknown field `{name}`", param=name, reason="unknown_field")
    if anchor != "created_at":
        raise ValidationError("`expires_after[anchor]` must be created_at", param="expires_after")
    if not seconds.isascii() or not seconds.isdigit() or not _SHORTEST_S <= int(seconds[:9]) <= LONGEST_S:
        text = f"`expires_after[seconds]` must be in {_SHORTEST_S}..={LONGEST_S}"
        raise ValidationError(text, param="expires_after")
    return int(seconds[:9])


@routes.get(_FILES, response_model=FileList, responses={401: _REFUSALS[401]})
async def files(request: Request) -> Response:
    """The files of the API key; query: `purpose`, `limit`, `after`, `order`."""
    found: Iterable[FileRecord] = _batches(request).files_of(_owner())
    if purpose := request.query_params.get("purpose"):
        found = [file for file in found if file.purpose == purpose]
    return _page(request, found, usual=_MOST_FILES, most=_MOST_FILES)


@routes.get(_FILE, response_model=FileObject, responses=_REFUSALS)
async def one_file(request: Request, file_id: str) -> Response:
    """A file's facts."""
    return JsonResponse(_file(request, file_id).shown())


@routes.get(
    _FILE + "/content",
    response_class=FileResponse,
    responses={
        **_REFUSALS,
        200: {
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            "description": "The file",
        },
    },
)
async def content(request: Request, file_id: str) -> Response:
    """A file itself."""
    file = _file(request, file_id)
    path = _batches(request).folder.data(file.id)
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


@routes.delete(_FILE, response_model=DeletedFile, responses=_REFUSALS)
async def delete_file(request: Request, file_id: str) -> Response:
    """Remove a file."""
    batches, file = _batches(request), _file(request, file_id)
    if (batch := batches.unended_with(file)) is not None:
        raise _conflict(f"{batch.id} still reads the file: cancel it first, or wait for its end")
    await batches.remove_file(file)
    return JsonResponse({"id": file.id, "object": "file", "deleted": True})


@routes.answers(_BATCHES, BatchBody, BatchObject, span="batches", generates=False)
async def create_batch(request: Request) -> Response:
    """Begin to answer the requests of a file."""
    batches, owner = _batches(request), _owner()
    body = await read_body(request, BatchBody, limit=LARGE_BODY, large=_LARGE)
    file = batches.folder.files.get(body.input_file_id)
    if file is None or file.owner != owner:
        raise _no_such("file", body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise ValidationError("`input_file_id` must be a file with purpose batch", param="input_file_id")
    unended = [one for one in batches.batches_of(owner) if one.status not in ENDED]
    if len(unended) >= batches.limits.num_unended:
        raise ValidationError(f"{len(unended)} batches have not ended, which is the most: wait, or cancel some")
    now = int(time.time())
    batch = BatchRecord(
        id=new_batch_id(),
        owner=owner,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_life_s=LONGEST_S if body.output_expires_after is None else body.output_expires_after.seconds,
        created_at=now,
        expires_at=now + (window_s(body.completion_window) or 0),
        answers_id=new_file_id(),
        failures_id=new_file_id(),
    )
    with _writing(batches):
        await batches.add_batch(batch)
    return JsonResponse(batch.shown())


@routes.get(_BATCHES, response_model=BatchList, responses={401: _REFUSALS[401]})
async def all_batches(request: Request) -> Response:
    """The batches of the API key, the newest first; query: `limit`, `after`."""
    found = _batches(request).batches_of(_owner())
    return _page(request, found, usual=_USUAL_BATCHES, most=_MOST_BATCHES)


@routes.get(_BATCH, response_model=BatchObject, responses=_REFUSALS)
async def one_batch(request: Request, batch_id: str) -> Response:
    """A batch, and how far it is."""
    return JsonResponse(_batch(request, batch_id).shown())


@routes.post(_BATCH + "/cancel", response_model=BatchObject, responses=_REFUSALS)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """End a batch. What has been answered becomes its files."""
    batch = _batch(request, batch_id)
    if batch.status in ENDED or batch.status == "finalizing":
        raise _conflict(f"a batch that is {batch.status} cannot be cancelled")
    if batch.status != "cancelling":
        await _batches(request).cancel(batch)
    return JsonResponse(batch.shown())


def _batches(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


def _owner() -> str:
    """Return the name of the request's API key; empty: keys are of no file."""
    asked = entered()
    return "" if asked is None or asked.account is None else asked.account.key.name


def _file(request: Request, file_id: str) -> FileRecord:
    """Raises NotServedError."""
    found = _batches(request).folder.files.get(file_id)
    if found is None or found.owner != _owner():
        raise _no_such("file", file_id)
    return found


def _batch(request: Request, batch_id: str) -> BatchRecord:
    """Raises NotServedError."""
    found = _batches(request).folder.batches.get(batch_id)
    if found is None or found.owner != _owner():
        raise _no_such("batch", batch_id)
    return found


def _no_such(kind: str, given: str, param: str = "id") -> NotServedError:
    text = f"no {kind} {given[:100]} is kept here, or not any more"
    return NotServedError(text, reason="unknown_response", param=param, code="not_found")


def _conflict(text: str) -> BodyError:
    return BodyError(409, "conflict", text, reason="conflict")


def _page(request: Request, records: Iterable[Record], *, usual: int, most: int) -> Response:
    found = sorted(records, key=lambda one: one.created_at)
    page = page_of(
        request.query_params, found, lambda one, given: one.id == given, lambda one: one.shown(), usual=usual, most=most
    )
    return JsonResponse(page)
