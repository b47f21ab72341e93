"""The OpenAPI document; routes declare their bodies, which handlers read themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api.errors import Family, family_of
from router.api.openapi.answers import (
    AUTHORIZATION,
    ERRORS,
    GENERATING,
    JSON_HEADERS,
    OTHER_APIS,
    REQUEST_ID,
    STREAM_HEADERS,
    STREAMS,
    StreamForm,
)
from router.api.openapi.names import TGI_NAMES, TGI_TITLE, name_operation, name_request, renamed
from router.config import TGI_VERSION
from router.schemas.errors import ErrorBody, MessagesError, OpenAIError

_REFERENCE = "#/components/schemas/{model}"
# Answers that no handler's signature names.
_ERRORS: dict[str, type[BaseModel]] = {"tgi": ErrorBody, "openai": OpenAIError, "anthropic": MessagesError}
_STREAMED = {
    "properties": {
        "parameters": {
            "properties": {
                "best_of": {"enum": [1, None]},
                "decoder_input_details": {"enum": [False, None]},
            }
        }
    }
}
"""What a stream that is not also a JSON answer takes less."""


def documented(
    bodies: Sequence[type[BaseModel]],
    response: Any,
    *,
    event: type[BaseModel] | None,
    stream: StreamForm,
    headers: Sequence[str],
    generates: bool,
    family: Family,
) -> dict[str, Any]:
    """Return `add_api_route`'s options for `Routes.answers`."""
    answers: dict[int | str, dict[str, Any]] = {200: _ok(response, event, stream, headers, family)}
    statuses = [status for status in ERRORS if generates or status not in GENERATING]
    if family != "tgi":
        statuses = [status for status in statuses if status not in (422, 424)]
    answers |= {status: _refusal(status, family) for status in statuses}
    schema = _reference(bodies[0]) if len(bodies) == 1 else {"anyOf": [_reference(one) for one in bodies]}
    if response is None:
        schema = {"allOf": [schema, _STREAMED]}
    content = {"schema": schema, "examples": {one.__name__: {"value": _example(one)} for one in bodies}}
    return {
        "responses": answers,
        "response_model": None,
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": content}},
            "security": [{}, {"bearer": []}],
        },
    }


def document(
    app: FastAPI, models: Sequence[type[BaseModel]], limits: object, root_path: str | None = None
) -> dict[str, Any]:
    """Make the document of schemas, bodies, events, and `limits`.

    Args:
        root_path: Before all its paths.
    """
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=TGI_VERSION,
            description="Tercet: text generation over HTTP, in the dialects of TGI and OpenAI",
            routes=app.routes,
            servers=None if root_path is None else [{"url": root_path}],
        )
        _, definitions = models_json_schema(
            [(model, "validation") for model in dict.fromkeys([*models, *_ERRORS.values()])], ref_template=_REFERENCE
        )
        components = schema.setdefault("components", {})
        schemas = definitions["$defs"] | components.get("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)  # FastAPI's own, which this server never answers
        components["schemas"] = dict(sorted((TGI_NAMES.get(name, name), one) for name, one in schemas.items()))
        components["securitySchemes"] = {"bearer": AUTHORIZATION}
        app.openapi_schema = _finished(renamed(schema), limits)
    return app.openapi_schema


def _finished(schema: dict[str, Any], limits: object) -> dict[str, Any]:
    is_tgi = schema["info"]["title"] == TGI_TITLE  # else TEI's, with routes of the same paths
    if is_tgi:
        name_request(schema["paths"], schema["components"]["schemas"])
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            if is_tgi:
                name_operation(path, method, operation)
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]
                content = {"application/json": {"schema": renamed(_reference(_ERRORS[family_of(path)]))}}
                answers.setdefault("404", {"description": "Not found", "content": content})
            content = answers["200"].get("content", {})
            if content.get("application/json") == {"schema": {}}:
                del content["application/json"]  # FastAPI's default: there are events only, or nothing
            for answer in answers.values():
                answer["headers"] = REQUEST_ID | answer.get("headers", {})
    finished = _limited(schema, limits)
    assert isinstance(finished, dict)
    return finished


def _limited(value: Any, limits: object) -> Any:
    """Fill in `x-limits`, or leave unknown ones out."""
    if isinstance(value, list):
        return [_limited(one, limits) for one in value]
    if not isinstance(value, dict):
        return value
    limited = {name: _limited(one, limits) for name, one in value.items() if name != "x-limits"}
    for keyword, name in value.get("x-limits", {}).items():
        if (limit := getattr(limits, name, None)) is not None:
            limited[keyword] = limit
    return limited


def _ok(
    response: Any, event: type[BaseModel] | None, stream: StreamForm, headers: Sequence[str], family: Family
) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "The answer"}
    described: dict[str, Any] = {name: JSON_HEADERS[name] for name in headers}
    if response is not None:
        ok["model"] = response
    if event is not None:
        ok["description"] = STREAMS[stream]
        events = [_reference(event), _reference(_ERRORS[family])]
        ok["content"] = {"text/event-stream": {"schema": {"anyOf": events}}}
        described = STREAM_HEADERS | described
    if described:
        ok["headers"] = described
    return ok


def _refusal(status: int, family: Family) -> dict[str, Any]:
    refusal = ERRORS[status]
    content: dict[str, Any] = {"schema": _reference(_ERRORS[family])}
    description = refusal.description
    if family == "tgi":
        content["examples"] = refusal.examples
    else:
        description = OTHER_APIS.get(status, description)
    answer: dict[str, Any] = {"description": description, "content": {"application/json": content}}
    return answer | ({"headers": refusal.headers} if refusal.headers else {})


def _example(model: type[BaseModel]) -> dict[str, Any]:
    """A body of the required fields' examples."""
    return {
        field.alias or name: (field.examples or [None])[0]
        for name, field in model.model_fields.items()
        if field.is_required()
    }


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
