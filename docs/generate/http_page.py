"""The routes and their bodies as Markdown, from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import cell, code, page, table
from router.api.batches import routes as batches_api
from router.api.openapi.answers import ERRORS, JSON_HEADERS, REQUEST_ID
from router.api.platforms import kserve
from router.server.app import create_app

Schema = dict[str, Any]
_INTRO = """\
Every route with its body and its answer, as `GET /api-doc/openapi.json` and `router print-schema` have them;
`GET /docs` shows the same in a browser. The limits are the defaults: a running server's document has its own. HEAD is
answered wherever GET is. Unknown fields are ignored, `null` means absent, `"20"` and `20.0` are not whole numbers.

With `--api-key` every POST needs `Authorization: Bearer <key>`. Metrics: [observability.md](../observability.md).
Differences to TGI: [migrating-from-tgi.md](../migrating-from-tgi.md)."""
_FLOAT32_MAX = 3.4028234663852886e38


def http_page() -> str:
    app = create_app()
    num_always = len(app.openapi()["paths"])
    app.include_router(batches_api.routes)
    app.openapi_schema = None
    num_before_kserve = len(app.openapi()["paths"])
    app.include_router(kserve.routes)
    app.openapi_schema = None
    whole = app.openapi()
    paths = list(whole["paths"].items())
    parts = [
        "# HTTP routes",
        _INTRO,
        "## Routes",
        table(("Route", "What it does", "Body", "Answer", "Refusals"), _routes(paths[:num_always])),
        "With `--batch-dir`:",
        table(("Route", "What it does", "Body", "Answer", "Refusals"), _routes(paths[num_always:num_before_kserve])),
        "With `--kserve-api`:",
        table(("Route", "What it does", "Body", "Answer", "Refusals"), _routes(paths[num_before_kserve:])),
        "## Refusals",
        "Of TGI's routes; OpenAI's and Anthropic's have 400 and 500 for 422 and 424, and bodies of their own: "
        "[all cases](../compatibility.md#errors). Unknown paths get 404, wrong methods 405.",
        table(("Status", "`error_type`", "When"), _refusals()),
        "## Headers of answers",
        table(("Header", "Meaning"), _headers()),
        "## Bodies",
        *_schemas(whole),
    ]
    return page(*parts)


def _routes(paths: list[tuple[str, Schema]]) -> Iterator[tuple[str, ...]]:
    for path, operations in paths:
        for method, operation in operations.items():
            body = _body(operation.get("requestBody", {}).get("content", {}))
            answers = operation["responses"]
            yield (
                code(f"{method.upper()} {path}"),
                cell(operation.get("description", "")),
                body or "–",
                _answer(answers["200"]),
                ", ".join(status for status in answers if status != "200") or "–",
            )


def _body(content: Schema) -> str:
    if (form := content.get("multipart/form-data")) is not None:
        return "form with " + ", ".join(map(code, form["schema"]["properties"]))
    return kind(content["application/json"]["schema"]) if content else ""


def _answer(answer: Schema) -> str:
    parts = []
    for media, content in answer.get("content", {}).items():
        one = kind(content["schema"])
        parts.append(f"events of {one}" if media == "text/event-stream" else one if "json" in media else media)
    return "; ".join(parts) or "empty"


def _refusals() -> Iterator[tuple[str, ...]]:
    for status, refusal in ERRORS.items():
        yield str(status), ", ".join(map(code, refusal.texts)), cell(refusal.description) + "."


def _headers() -> Iterator[tuple[str, ...]]:
    for name, header in (REQUEST_ID | JSON_HEADERS).items():
        yield code(name), cell(header["description"]) + "."


def _schemas(whole: Schema) -> Iterator[str]:
    for name, schema in sorted(whole["components"]["schemas"].items()):
        yield f"### {name}"
        if text := schema.get("description"):
            yield " ".join(text.split())
        required = schema.get("required", ())
        rows = [_field(key, field, key in required) for key, field in schema.get("properties", {}).items()]
        if rows:
            yield table(("Field", "Value", "Default", "Meaning"), rows)
        else:
            yield kind(schema)


def _field(name: str, field: Schema, is_required: bool) -> tuple[str, ...]:
    preset = field.get("default")
    default = "required" if is_required else code(json.dumps(preset)) if preset not in (None, []) else "–"
    return code(name), kind(field), default, cell(field.get("description", "")) or "–"


def kind(schema: Schema) -> str:
    """What a value may be, in words; that it may be null goes without saying where it may be left out."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "allOf" in schema:
        return kind(schema["allOf"][0])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            kinds = [kind(one) for one in schema[word] if one != {"type": "null"}]
            return " or ".join(dict.fromkeys(kinds)) or "null"
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(one)) for one in schema["enum"])
    if schema.get("type") == "array" and schema.get("maxItems") == 0:
        return "empty list"
    if schema.get("type") == "array":
        bound = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {kind(schema.get('items', {}))}{bound}"
    if "type" not in schema:
        return "any JSON"
    if isinstance(values := schema.get("additionalProperties"), dict) and values:
        return f"object of {kind(values)}"
    return " ".join(filter(None, [str(schema["type"]), _bounds(schema)]))


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {schema[word]}"
        for word, sign in signs.items()
        if word in schema and abs(schema[word]) != _FLOAT32_MAX and schema[word] < 2**31 - 1
    ]
    return ", ".join(bounds)
