"""Whatever is wrong with a field, the refusal names the field that the client sent, and none of another API."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from router_fakes import Router

from router.answers.formats.choice import ModelFormat
from router.answers.formats.reasoning import named as style_named
from router.answers.formats.table import FORMATS
from router.api.chat.schema import ChatBody
from router.api.completions.schema import CompletionBody
from router.api.messages.schema import MessagesBody
from router.api.responses.schema import ResponsesBody

MakeRouter = Callable[..., Router]

SAID = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, SAID),
    "/v1/completions": (CompletionBody, {"prompt": "Hi", "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "Hi", "max_output_tokens": 16}),
    "/v1/messages": (MessagesBody, SAID | {"model": "m"}),
}
NO_SCHEMA = {"type": "nope"}
VALUES: list[Any] = [
    {}, [], "", "x", "(", -7, 10**9, 1.5, True, [{}], {"a": "x"}, {"json": NO_SCHEMA}, {"json": "("}, {"choice": []},
    {"regex": ""}, {"type": "regex"}, {"type": "regex", "value": "("}, {"type": "json_object", "value": "("},
    {"type": "json_schema", "json_schema": {"schema": NO_SCHEMA}}, {"type": "json_schema", "json_schema": {}},
    {"format": {"type": "json_schema", "schema": NO_SCHEMA}}, {"effort": 3}, {"type": "function", "name": "f"},
    [{"type": "function", "function": {"name": "f", "strict": True, "parameters": NO_SCHEMA}}],
    [{"type": "function", "name": "f", "strict": True, "parameters": NO_SCHEMA}],
    [{"name": "f", "strict": True, "input_schema": NO_SCHEMA}],
]  # fmt: skip
FIELDS_OF_OTHERS = {"max_new_tokens", "top_n_tokens", "grammar", "inputs", "response_format", "text", "output_config"}


def fields_of(body_type: type[BaseModel]) -> list[str]:
    names = [field.alias or name for name, field in body_type.model_fields.items()]
    return [*names, "best_of", "max_completion_tokens"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_refusal_names_the_field_that_was_sent(make_router: MakeRouter, path: str, thinks: bool) -> None:
    body_type, said = ROUTES[path]
    format = ModelFormat(format=FORMATS["hermes"], style=style_named("think")) if thinks else ModelFormat()
    router = make_router(model_format=format)
    changes = [{name: value} for name, value in itertools.product(fields_of(body_type), VALUES)]
    choice: Any = {"type": "any"} if path == "/v1/messages" else "required"
    changes += [{"tools": value, "tool_choice": choice} for value in VALUES if path != "/v1/completions"]
    for change in changes:
        answer = await router.post(path, said | change)
        if answer.status_code == 200:
            continue
        assert answer.status_code in (400, 404), (change, answer.text)
        error, sent = answer.json()["error"], said | change
        if path != "/v1/messages":
            assert error["param"] is not None and re.split(r"[.\[]", error["param"])[0] in sent, (change, error)
        words = {one.partition(".")[0] for one in re.findall(r"`([a-z_.]+)`", error["message"])}
        assert not words & (FIELDS_OF_OTHERS - sent.keys()), (change, error)
        assert any(one in error["message"] for one in sent) or path != "/v1/messages", (change, error)
