"""The OpenAPI document. Handlers read their bodies themselves, so each route says what its body is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.config import TGI_VERSION
from router.schemas.chat import ChatBody, ChatChunk
from router.schemas.completion import CompletionBody, CompletionChunk
from router.schemas.generate import CompatBody, GenerateBody, StreamEvent, TokenizeBody
from router.schemas.platforms import InferBody, VertexBody
from router.schemas.service import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
# Bodies and events that no handler's signature names.
_MODELS: list[type[BaseModel]] = [
    GenerateBody, CompatBody, TokenizeBody, StreamEvent, ChatBody, ChatChunk, CompletionBody, CompletionChunk,
    VertexBody, InferBody,
]  # fmt: skip
_ERRORS: dict[int | str, dict[str, Any]] = {
    422: {"model": ErrorBody, "description": "The request is at fault"},
    424: {"model": ErrorBody, "description": "Generation failed"},
    429: {"model": ErrorBody, "description": "Model is overloaded"},
    500: {"model": ErrorBody, "description": "Incomplete generation"},
}


def documented(
    body: type[BaseModel] | Sequence[type[BaseModel]],
    response: Any,
    *,
    event: type[BaseModel] | None = None,
    streamed: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of a route decorator: its body or bodies, its answer, its events if it streams."""
    if streamed:
        event, response = response, None
    answers: dict[int | str, dict[str, Any]] = dict(_ERRORS)
    ok: dict[str, Any] = {"description": "Generated text"}
    if response is not None:
        ok["model"] = response
    if event is not None:
        ok["content"] = {"text/event-stream": {"schema": _reference(event)}}
    schema = _reference(body) if isinstance(body, type) else {"anyOf": [_reference(one) for one in body]}
    content = {"application/json": {"schema": schema}}
    return {
        "responses": {200: ok} | answers,
        "response_model": None,
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


def document(app: FastAPI) -> dict[str, Any]:
    """The document with the schemas of all bodies."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title="Text Generation Inference",
            version=TGI_VERSION,
            description="Tercet: text generation over HTTP, native and OpenAI dialects",
            routes=app.routes,
        )
        _, definitions = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REFERENCE)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schema["components"]["schemas"] = definitions["$defs"] | schemas
        app.openapi_schema = schema
    return app.openapi_schema


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
