"""Reads and checks bodies: content type, size, JSON, shape, in that order.

Stricter than Python's JSON: no NaN, duplicate keys, numbers beyond 64 bits, lone surrogates, over 128 levels (TGI's
limit) or 200,000 objects.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson
import pydantic
from starlette.requests import ClientDisconnect, Request

from router.api.errors import RENAMED, BodyError
from router.api.http.base64_runs import Base64Runs
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.faults import clean, first_fault, integer, number_out_of_range
from router.errors import FieldError
from router.generation.parsed_bodies import ParsedBodies
from router.schemas.base import Body
from router.schemas.unknown import UnknownNames
from router.worker.lane import Lane

T = TypeVar("T")
BodyType = TypeVar("BodyType", bound=Body)

_MAX_DEPTH = 128
# Parsed off the event loop, one at a time: each thread that computes makes the loop wait for the interpreter.
LARGE_BODY = 64 * 1024
_JOINED_IN_A_THREAD = 2 << 20
# Of objects and arrays. The garbage collector goes through all of them in one go, 20 ms for this many.
_MAX_CONTAINERS = 200_000
_MANY_CONTAINERS = 2_000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)
# A string that never ends is one too: it would be looked for again at each of its escaped quotes otherwise.
_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)


class _ShapeError(ValueError):
    """Valid syntax that no body can have: 422."""


class _NumberError(_ShapeError):
    """A number that no field can hold."""


@dataclass(frozen=True)
class LargeBodies:
    """Parses bodies above LARGE_BODY, and queues those of many objects."""

    lane: Lane
    parsed: ParsedBodies

    async def parse(self, request: Request, raw: bytes, work: Callable[[], T]) -> T:
        """Run `work` on a body, unless the client disconnects."""
        if len(raw) <= LARGE_BODY:
            return work()
        return await cancel_on_disconnect(request.receive, self._parse(raw, work))

    async def _parse(self, raw: bytes, work: Callable[[], T]) -> T:
        if await asyncio.to_thread(_num_brackets, raw) > _MANY_CONTAINERS:
            await self.parsed.enter(len(raw))
        return await self.lane.run(len(raw), work)


def _num_brackets(raw: bytes) -> int:
    """Bound objects and arrays, in about a millisecond."""
    return raw.count(b"{") + raw.count(b"[")


async def read_body(request: Request, body_type: type[BodyType], *, limit: int, large: LargeBodies) -> BodyType:
    """Read and check a body.

    Raises:
        BodyError: It is wrong; OverloadedError while too many large ones wait.
        ClientDisconnect: It did not come whole.
    """
    raw = await _read_json(request, limit)
    return await large.parse(request, raw, partial(_checked, raw, body_type, _renamed(request)))


async def read_one_of(request: Request, *body_types: type[Body], limit: int, large: LargeBodies) -> Body:
    """Read the first fitting type, each known by its required member."""
    raw = await _read_json(request, limit)
    return await large.parse(request, raw, partial(_checked_one_of, raw, body_types, _renamed(request)))


def _renamed(request: Request) -> dict[str, str]:
    renamed: dict[str, str] = request.scope.setdefault(RENAMED, {})
    return renamed


async def _read_json(request: Request, limit: int) -> bytes:
    content_type = request.headers.get("content-type", "")
    if not _JSON_TYPE.fullmatch(content_type.strip()):
        raise _unsupported("Expected request with `Content-Type: application/json`")
    if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise _unsupported("compressed bodies are not read: send the JSON without `Content-Encoding`")
    return await read_bytes(request, limit)


def _unsupported(message: str) -> BodyError:
    return BodyError(415, "unsupported_media_type", message, reason="content_type")


def _checked(raw: bytes, body_type: type[BodyType], renamed: dict[str, str]) -> BodyType:
    return _validated(parse_json(raw), body_type, renamed)


def _validated(value: Any, body_type: type[BodyType], renamed: dict[str, str]) -> BodyType:
    unknown = UnknownNames(renamed)
    try:
        body = body_type.model_validate(value, context=unknown)
        fault = unknown.fault
    except pydantic.ValidationError as error:
        # A misspelt name may be why another is missing.
        fault = unknown.fault or first_fault(error, value, renamed)
    if fault is None:
        return body
    # Out here, so that pydantic's error is not the context of ours: it hides what it refers to from the garbage
    # collector, and in a cycle with the frames of the request it would keep all of these for good.
    raise _misshapen(fault)


def _checked_one_of(raw: bytes, body_types: Sequence[type[Body]], renamed: dict[str, str]) -> Body:
    value = parse_json(raw)
    fault: BodyError | None = None
    marks = {_mark(body_type): body_type for body_type in body_types}
    for mark, body_type in marks.items():
        if isinstance(value, dict) and value.get(mark) is not None:
            try:
                return _validated(value, body_type, renamed)
            except BodyError as error:
                fault = fault or error
    if fault is not None:
        raise fault
    text, misspelt = f"expected an object with one of {', '.join(f'`{mark}`' for mark in marks)}", UnknownNames()
    if isinstance(value, dict):
        misspelt.found(value, frozenset(marks))
    raise _misshapen(misspelt.fault or FieldError(text, reason="missing_field"))


def _mark(body_type: type[Body]) -> str:
    return next(name for name, field in body_type.model_fields.items() if field.is_required())


def _misshapen(fault: FieldError) -> BodyError:
    return BodyError(
        422,
        "validation",
        str(fault),
        prefix="Failed to deserialize the JSON body: ",
        reason=fault.reason,
        param=fault.param,
        code=fault.code,
    )


async def read_bytes(request: Request, limit: int) -> bytes:
    """At most `limit` bytes, whatever Content-Length promises."""
    text = f"The body must not exceed {limit} bytes"
    too_large = BodyError(413, "payload_too_large", text, reason="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    # In a thread where it takes a millisecond or more: other threads run while so much is joined.
    return b"".join(parts) if size < _JOINED_IN_A_THREAD else await asyncio.to_thread(b"".join, parts)


def parse_json(raw: bytes) -> Any:
    """Parse JSON.

    Raises:
        BodyError: 400 for syntax, 422 for what no request may hold.
    """
    files = Base64Runs(raw)
    raw = files.rest
    try:
        if _num_brackets(raw) > _MAX_DEPTH:
            _check_structure(raw)
        if _SURROGATE.search(raw):
            orjson.loads(raw)  # refuses half pairs, which Python's parser lets through
        return files.put_back(_DECODER.decode(raw.decode().removeprefix("\ufeff")))
    except _NumberError as error:
        place = number_out_of_range(raw.decode())
        raise _misshapen(FieldError(f"{place}: {error}" if place else str(error), param=place)) from None
    except _ShapeError as error:
        raise _misshapen(FieldError(str(error))) from None
    except (ValueError, RecursionError) as error:
        detail = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        said = clean(detail) if raw.strip() else "it is empty"
        text = f"Failed to parse the request body as JSON: {said}"
        raise BodyError(400, "bad_request", text, reason="malformed_json") from None


def _check_structure(raw: bytes) -> None:
    """Counts brackets outside of strings."""
    depth = num_containers = 0
    for match in _BRACKETS.finditer(raw):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            num_containers += 1
            if depth > _MAX_DEPTH:
                raise ValueError("nested too deeply")
            if num_containers > _MAX_CONTAINERS:
                raise _ShapeError(f"more than {_MAX_CONTAINERS} objects and arrays")
        elif token in (b"]", b"}"):
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _ShapeError(f"duplicate field `{clean(twice)}`")
    return members


def _integer(digits: str) -> int:
    if (value := integer(digits)) is None:
        raise _NumberError("number out of range")
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NumberError("number out of range")
    return value


def _constant(name: str) -> Any:
    # Not JSON in the strict sense; answered like every other number that no field can hold.
    raise _NumberError(f"{name} is not a valid JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant, strict=True
)


__all__ = ["BodyError", "ClientDisconnect", "parse_json", "read_body", "read_one_of"]
