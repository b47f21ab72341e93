"""The OpenAPI document and the code say the same.

What a field may be is read from the document, and values on either side of each bound are sent to the router: what the
document allows must be answered, what it does not must be refused with 422.
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema
from router_fakes import LIMITS, Router

from router.api.chat import routes as chat
from router.api.completions import routes as completions
from router.api.messages import routes as messages
from router.api.openapi.names import TGI_NAMES
from router.api.platforms import cloud as platforms
from router.api.responses import routes as responses
from router.api.responses.input_items import StoredItem
from router.api.service import routes as service
from router.api.tgi import routes as generate
from router.api.tgi import tokenize
from router.config import RouterConfig
from router.schemas.base import Body
from router.schemas.guided import Constrained
from router.schemas.openai import OpenAIBody, OpenAIParameters, TemplateBody, TieredParameters
from router.schemas.parameters import CommonParameters
from router.server.app import create_app
from router.server.pooled_app import create_pooled_app

Schema = dict[str, Any]
GENERATING = [
    "/generate",
    "/generate_stream",
    "/",
    "/v1/chat/completions",
    "/v1/completions",
    "/invocations",
    "/vertex",
]
TESTED = [
    "/generate",
    "/generate_stream",
    "/",
    "/tokenize",
    "/chat_tokenize",
    "/v1/chat/completions",
    "/v1/completions",
]
SHARED_BY_BODIES = (
    CommonParameters,
    OpenAIParameters,
    TieredParameters,
    OpenAIBody,
    TemplateBody,
    Constrained,
    StoredItem,
)
"""No bodies themselves: the document has their fields in those that inherit them."""
# What else a body needs before a value means what the document says of it.
NAMES_ANOTHER = {
    "suffix",  # a tokenizer with marks
    "guided_json",
    "structured_outputs",
    "structured_outputs.json",
    "structured_outputs.grammar",
    "guided_grammar",
    "ebnf",
    "tool_choice",
    "documents",
    "continue_final_message",
    "min_tokens",
    "parameters.min_tokens",
    "parameters.adapter_id",
}
"""What is right depends on another field, or on what the server has loaded; only the examples are sent."""
COMPANIONS: dict[str, Any] = {
    "/v1/completions best_of": lambda value: {"n": value},
    "/generate parameters.best_of": lambda value: {"do_sample": True},
    "/ parameters.best_of": lambda value: {"do_sample": True},
    "/v1/chat/completions top_logprobs": lambda value: {"logprobs": True},
    "/chat_tokenize top_logprobs": lambda value: {"logprobs": True},
}


@pytest.fixture(scope="module")
def document() -> Schema:
    return create_app().openapi()


@pytest.fixture
def router(make_router: Callable[..., Router]) -> Router:
    """With model servers that know all grammars, and priorities."""
    return make_router(limits=replace(LIMITS, has_priorities=True))


@pytest.fixture
def served_document(router: Router, made_documents: list[Schema]) -> Schema:
    """That of a server with model servers: the same for every router here, and made once."""
    if not made_documents:
        made_documents.append(router.app.openapi())
    return copy.deepcopy(made_documents[0])


@pytest.fixture(scope="module")
def made_documents() -> list[Schema]:
    return []


def resolved(document: Schema, schema: Schema) -> Schema:
    """Without a reference at its top, and with what `allOf` adds."""
    if "$ref" in schema:
        return resolved(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "allOf" not in schema:
        return schema
    whole: Schema = {}
    for part in schema["allOf"]:
        whole = merged(document, whole, resolved(document, part))
    return whole


def merged(document: Schema, first: Schema, second: Schema) -> Schema:
    """`second` narrows fields of `first`, to any depth."""
    whole = copy.copy(first)
    for name, value in second.items():
        if name != "properties" or name not in whole:
            whole = whole | {name: value}
            continue
        fields = dict(whole["properties"])
        for field, narrower in value.items():
            own = fields.get(field, {})
            nested = next((one for one in own.get("anyOf", [own]) if "$ref" in one), None)
            base = own if nested is None else own | {"anyOf": [resolved(document, nested), {"type": "null"}]}
            if "properties" in narrower and nested is not None:
                inner = merged(document, base["anyOf"][0], narrower)
                fields[field] = base | {"anyOf": [inner, {"type": "null"}]}
            else:
                fields[field] = {name: text for name, text in own.items() if name != "anyOf"} | narrower
        whole["properties"] = fields
    return whole


def body_schema(document: Schema, path: str) -> tuple[Schema, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = content["schema"]  # of several bodies the first
    return resolved(document, schema.get("anyOf", [schema])[0]), next(iter(content["examples"].values()))["value"]


def fields(document: Schema, schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Each field of a body with its schema; those below too, as `outer.inner`, unless they need neighbours."""
    for name, field in schema["properties"].items():
        yield path + name, field
        for kind in kinds(document, field):
            if "properties" in kind and not kind.get("required"):
                yield from fields(document, kind, f"{path}{name}.")


def kinds(document: Schema, field: Schema) -> list[Schema]:
    """What a field may be: the alternatives, resolved."""
    return [resolved(document, kind) for kind in field.get("anyOf", [field])]


def inside_and_outside(document: Schema, field: Schema) -> tuple[list[Any], list[Any]]:
    """Values at the edges of what the document allows, and just beyond them."""
    alternatives = kinds(document, field)
    inside: list[Any] = list(field.get("examples", []))
    outside: list[Any] = []
    for kind in alternatives:
        for good, bad in (_edges(kind), _lengths(kind)):
            inside += good
            outside += bad
        inside += kind.get("enum", [])
    if alternatives != [{}] and not any(kind.keys() <= {"title", "description"} for kind in alternatives):
        outside += [True, "words of no meaning here", 7, 1.5, -1.5, [[[]]], [7.5], None, {"a": {"b": [None]}}]
    # Values are what the document says of them, whichever alternative they came from.
    whole = {"$defs": {}, "components": document["components"]} | {"anyOf": [field]}
    validator = jsonschema.Draft202012Validator(whole)
    every = inside + outside
    return [one for one in every if _is_valid(validator, one)], [one for one in every if not _is_valid(validator, one)]


def _is_valid(validator: jsonschema.Draft202012Validator, value: Any) -> bool:
    """The router is stricter than JSON Schema in one thing: 20.0 is no integer."""
    return bool(validator.is_valid(value))


def _edges(kind: Schema) -> tuple[list[Any], list[Any]]:
    good: list[Any] = []
    bad: list[Any] = []
    is_integer = kind.get("type") == "integer"
    step: float = 1 if is_integer else 1e-3
    for bound, sign in (("minimum", -1), ("maximum", 1)):
        if bound in kind:
            edge = kind[bound]
            good.append(edge)
            bad.append(edge * 10 if abs(edge) > 1e30 else edge + sign * step)
    for bound, sign in (("exclusiveMinimum", -1), ("exclusiveMaximum", 1)):
        if bound in kind:
            bad.append(kind[bound])
            good.append(kind[bound] - sign * step)
    return good, [one for one in bad if not isinstance(one, float) or math.isfinite(one)]


def _lengths(kind: Schema) -> tuple[list[Any], list[Any]]:
    good: list[Any] = []
    bad: list[Any] = []
    if kind.get("type") == "string":
        if "minLength" in kind:
            good, bad = ["x" * kind["minLength"]], ["x" * (kind["minLength"] - 1)]
        if "maxLength" in kind:
            good, bad = [*good, "x" * kind["maxLength"]], [*bad, "x" * (kind["maxLength"] + 1)]
    elif kind.get("type") == "array" and kind.get("items", {}).get("type") == "string":
        for bound, step in (("minItems", -1), ("maxItems", 1)):
            if bound in kind:
                good.append([f"<{number}>" for number in range(kind[bound])])
                bad.append([f"<{number}>" for number in range(kind[bound] + step)])
    elif kind.get("type") == "object" and "maxProperties" in kind:
        bad.append({str(number): 0 for number in range(kind["maxProperties"] + 1)})
    return good, bad


def placed(body: Any, path: str, field: str, value: Any) -> Any:
    """The body with a value at `outer.inner`; what is outside of it is as small as it can be."""
    body = copy.deepcopy(body)
    *outer, last = field.split(".")
    place = body
    for name in outer:
        place = place.setdefault(name, {})
    place[last] = value
    if field.startswith("stream_options"):
        body["stream"] = True
    companion = COMPANIONS.get(f"{path} {field}")
    if companion is not None and isinstance(value, int) and not isinstance(value, bool):
        place |= companion(value)
    return body


def is_ignored(path: str, field: str) -> bool:
    """These routes look at what concerns the text; the rest of the body must only have the right types."""
    return (path == "/tokenize" and field != "inputs") or (path == "/chat_tokenize" and field != "messages")


def of_the_right_type(document: Schema, field: Schema, value: Any) -> bool:
    """Whether only a bound is in the way."""
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    allowed = {kind.get("type") for kind in kinds(document, field)}
    if allowed == {"null"}:
        return isinstance(value, str)  # a text that no generation may have
    return types.get(type(value)) in allowed or (isinstance(value, int) and "number" in allowed)


@pytest.mark.parametrize("path", TESTED)
async def test_bounds_are_those_of_the_code(router: Router, served_document: Schema, path: str) -> None:
    schema, base = body_schema(served_document, path)
    checked = 0
    faults: list[Any] = []

    async def check(field: str, value: Any, status: int) -> None:
        nonlocal checked
        checked += 1
        answer = await router.post(path, placed(base, path, field, value))
        if answer.status_code != status:
            faults.append((field, str(value)[:200], answer.status_code, answer.text[:200]))
        router.assert_idle()

    for field, of_field in fields(served_document, schema):
        good, bad = inside_and_outside(served_document, of_field)
        if field in NAMES_ANOTHER:
            good = of_field["examples"]
        for value in good:
            await check(field, value, 200)
        for value in bad:
            if not (is_ignored(path, field) and of_the_right_type(served_document, of_field, value)):
                await check(field, value, 400 if path.startswith("/v1/") else 422)
    assert not faults, "\n".join(map(str, faults))
    assert checked > 100


@pytest.mark.parametrize("path", [*GENERATING, "/tokenize", "/chat_tokenize", "/detokenize", "/apply-template"])
async def test_the_examples_are_answered(router: Router, served_document: Schema, path: str) -> None:
    content = served_document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        answer = await router.post(path, example["value"])
        assert answer.status_code == 200, answer.text


def test_every_field_of_every_body_is_described(document: Schema) -> None:
    schemas = document["components"]["schemas"]
    seen = 0
    for model in bodies(Body):
        properties = schemas[TGI_NAMES.get(model.__name__, model.__name__)]["properties"]
        names = {
            field.alias or name: field
            for name, field in model.model_fields.items()
            if SkipJsonSchema() not in field.metadata  # what a validator makes of other fields
        }
        assert set(properties) == set(names), model
        for name, field in properties.items():
            assert field.get("description"), f"{model.__name__}.{name} has no description"
            assert field.get("examples"), f"{model.__name__}.{name} has no example"
            if not names[name].is_required():
                nulls = [kind for kind in kinds(document, field) if kind.get("type") == "null" or not set(kind) - {
                    "title", "description", "examples", "default"}]  # fmt: skip
                assert nulls, f"{model.__name__}.{name} may be left out, so it may be null"
            seen += 1
    assert seen > 100


# Of the schemas in TGI 3.3.7's docs/openapi.json.
NAMES_OF_TGI = {
    "BestOfSequence", "ChatCompletion", "ChatCompletionChoice", "ChatCompletionChunk", "ChatCompletionComplete",
    "ChatCompletionDelta", "ChatCompletionLogprob", "ChatCompletionLogprobs", "ChatCompletionTopLogprob", "ChatRequest",
    "ChatTokenizeResponse", "Chunk", "CompatGenerateRequest", "CompletionComplete", "CompletionFinal",
    "CompletionRequest", "DeltaToolCall", "Details", "ErrorResponse", "FinishReason", "Function", "FunctionDefinition",
    "GenerateParameters", "GenerateRequest", "GenerateResponse", "GrammarType", "Info", "Message", "ModelInfo",
    "OutputMessage", "PrefillToken", "SagemakerRequest", "SagemakerResponse", "SagemakerStreamResponse", "SimpleToken",
    "StreamDetails", "StreamOptions", "StreamResponse", "Token", "TokenizeResponse", "Tool", "ToolCall", "Url", "Usage",
    "VertexRequest", "VertexResponse",
}  # fmt: skip


def test_schemas_have_tgis_names(document: Schema) -> None:
    schemas = document["components"]["schemas"]
    assert schemas.keys() >= NAMES_OF_TGI
    assert len(set(TGI_NAMES.values())) == len(TGI_NAMES)
    assert not set(TGI_NAMES) - set(TGI_NAMES.values()) & schemas.keys()
    written = json.dumps(document)
    for name in ("FinishReason", "SagemakerRequest", "TokenizeResponse", *TGI_NAMES.values()):
        assert f'"#/components/schemas/{name}"' in written, f"nothing refers to {name}"
    (event,) = document["paths"]["/invocations"]["post"]["responses"]["200"]["content"]["text/event-stream"].values()
    assert event["anyOf"][0] == {"$ref": "#/components/schemas/SagemakerStreamResponse"}
    assert "object" in schemas["ModelInfo"]["required"]


# Of the operations in the same file, and of Vertex'.
OPERATIONS_OF_TGI = {
    "chat_completions", "compat_generate", "completions", "generate", "generate_stream", "get_chat_tokenize",
    "get_model_info", "health", "metrics", "openai_get_model_info", "sagemaker_compatibility", "tokenize",
    "vertex_compatibility",
}  # fmt: skip


def test_operations_have_tgis_names_and_tag(document: Schema) -> None:
    operations = [one for path in document["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    assert {one["operationId"] for one in operations if one["tags"] == ["Text Generation Inference"]} == (
        OPERATIONS_OF_TGI
    )


def test_the_document_of_embeddings_has_no_names_of_tgi() -> None:
    document = create_pooled_app().openapi()
    assert document["info"]["title"] == "Text Embeddings Inference"
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert {one["operationId"] for one in operations} & {"generate", "compat_generate", "get_model_info"} == set()
    assert all("Text Generation Inference" not in one["tags"] for one in operations)


def bodies(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in kind.__subclasses__():
        if (
            model.__module__.startswith(("router.schemas", "router.api"))
            and not model.__module__.startswith("router.api.embeddings")  # another server's, if it is imported at all
            and model.model_fields
            and model not in SHARED_BY_BODIES
        ):
            yield model
        yield from bodies(model)


def test_the_document_of_a_server_has_its_limits(document: Schema, served_document: Schema) -> None:
    def limits(of: Schema) -> Any:
        properties = of["components"]["schemas"]["GenerateParameters"]["properties"]
        return properties["best_of"]["anyOf"][0]["maximum"], properties["truncate"]["anyOf"][0].get("maximum")

    assert limits(document) == (RouterConfig().max_best_of, None)
    assert limits(served_document) == (LIMITS.max_best_of, LIMITS.max_input_tokens)
    assert "x-limits" not in json.dumps(served_document)


async def test_answers_have_the_headers_that_are_documented(router: Router, document: Schema) -> None:
    for path in GENERATING:
        _, base = body_schema(document, path)
        answer = await router.post(path, base)
        documented = set(document["paths"][path]["post"]["responses"]["200"]["headers"])
        ours = {name for name in answer.headers if name.startswith("x-")} - {"x-accel-buffering"}
        assert ours == documented if path != "/invocations" else ours >= documented, path


async def test_answers_and_events_fit_their_schemas(router: Router, document: Schema) -> None:
    for path in GENERATING:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        _, base = body_schema(document, path)
        if "application/json" in content:
            schema = content["application/json"]["schema"] | {"components": document["components"]}
            jsonschema.validate((await router.post(path, base)).json(), schema)
        if "text/event-stream" in content:
            schema = content["text/event-stream"]["schema"] | {"components": document["components"]}
            answer = await router.post(path, base | {"stream": True})
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line and "[DONE]" not in line]
            assert len(lines) >= 2
            for line in lines:
                jsonschema.validate(json.loads(line), schema)


async def test_refusals_fit_their_schemas(router: Router, document: Schema) -> None:
    for path in GENERATING:
        responses = document["paths"][path]["post"]["responses"]
        for raw, kind, status in (
            (b"{", "application/json", 400),
            (b" " * 3_000_000, "application/json", 413),
            (b"{}", "text/plain", 415),
            (b"{}", "application/json", 422),
        ):
            status = 400 if status == 422 and path.startswith("/v1/") else status
            answer = await router.request("POST", path, content=raw, headers={"content-type": kind})
            assert answer.status_code == status
            content = responses[str(status)]["content"]["application/json"]
            jsonschema.validate(answer.json(), content["schema"] | {"components": document["components"]})
            if status != 422 and not path.startswith("/v1/"):
                assert answer.json()["error_type"] in content["examples"]


def test_every_route_is_in_the_document(served_document: Schema) -> None:
    modules = (chat, completions, generate, messages, platforms, responses, service, tokenize)
    served = {
        (route.path.replace(":path", ""), method)
        for module in modules
        for route in module.routes.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    described = {(path, method.upper()) for path, item in served_document["paths"].items() for method in item}
    assert served == described and ("/generate", "POST") in described
    for item in served_document["paths"].values():
        for operation in item.values():
            assert operation["description"]
            assert all("x-request-id" in answer["headers"] for answer in operation["responses"].values())


def test_the_document_is_valid(document: Schema, served_document: Schema) -> None:
    openapi_spec_validator.validate(document)
    openapi_spec_validator.validate(served_document)


def test_print_schema_prints_it(document: Schema) -> None:
    done = subprocess.run([sys.executable, "-m", "router", "print-schema"], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(document))
