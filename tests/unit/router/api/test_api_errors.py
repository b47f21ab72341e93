"""The form of errors: the table of docs/compatibility.md against every API, OpenAI's client, faults of the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from router_fakes import Router, data_of, failing, is_invalid, message_of
from support import documents

from router.config import RouterConfig
from router.errors import GenerationError, IncompleteError
from wire.keys import Key, digest_of

MakeRouter = Callable[..., Router]

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TGI, OPENAI, ANTHROPIC = "/generate", "/v1/chat/completions", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    TGI: {"inputs": "Hello", "parameters": {}},
    OPENAI: {"messages": HELLO},
    ANTHROPIC: {"model": "m", "max_tokens": 5, "messages": HELLO},
}
LONG = "ab " * 3000
KEYED = RouterConfig(tokenizer_name="some/model", api_key="secret", payload_limit=100_000)
NO_TEMPLATE: dict[str, Any] = {"templates": {}}
Sent = tuple[str, dict[str, Any]]


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A body of the route with other fields, TGI's among its parameters."""
    whole = BODIES[path]
    if path == TGI and not fields.keys() & {"inputs", "paramters"}:
        return whole | {"parameters": fields}
    return whole | fields


def sent(*fields: dict[str, Any] | None) -> list[Sent | None]:
    """What TGI's, OpenAI's and Anthropic's route are sent; None: nothing."""
    return [
        None if one is None else (path, body(path, **one))
        for path, one in zip((TGI, OPENAI, ANTHROPIC), fields, strict=True)
    ]


WRONG_FIELDS: dict[str, list[Sent | None]] = {
    "a value of another type": sent({"seed": "x"}, {"seed": "x"}, {"top_p": "x"}),
    "a number out of its range": sent({"max_new_tokens": 0}, {"max_tokens": 0}, {"max_tokens": 0}),
    "a field is missing": [(TGI, {}), (OPENAI, {}), (ANTHROPIC, {})],
    "a misspelt field": sent({"temprature": 1}, {"temprature": 1}, {"temprature": 1}),
    "a field that is not served": sent(None, {"bad_words": ["x"]}, {"container": "x"}),
    "a value that means nothing": sent(
        {"grammar": {"type": "bnf", "value": "x"}}, {"response_format": {"type": "bnf"}},
        {"tool_choice": {"type": "x"}},
    ),
    "the prompt is too long": sent(
        {"inputs": LONG}, {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": LONG}]},
    ),
    "tools that cannot be offered": [
        ("/invocations", BODIES[OPENAI] | {"tool_choice": "f"}),
        (OPENAI, BODIES[OPENAI] | {"tool_choice": "f"}),
        (ANTHROPIC, BODIES[ANTHROPIC] | {"tool_choice": {"type": "any"}}),
    ],
    "too many prompts": [
        ("/vertex", {"instances": [BODIES[TGI]] * 5}), ("/v1/completions", {"prompt": ["x"] * 5}), None,
    ],
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {
    "a key without the scope": {"scopes": frozenset({"metrics"})},
    "a key for other models": {"models": frozenset({"other"})},
    "a key's requests a minute": {"requests_per_minute": 1},
    "a key's tokens a minute": {"tokens_per_minute": 1},
    "a key's concurrent requests": {"concurrent": 1},
}
ROWS = documents.rows(documents.section(documents.read("docs/compatibility.md"), "Errors"))
TABLE = {case: cells for case, *cells in ROWS if len(cells) == 3}


def check(answers: Sequence[httpx.Response | None], case: str) -> None:
    """Each answer against its cell: status, then TGI's type, or the type and the code."""
    for answer, cell in zip(answers, TABLE[case], strict=True):
        if answer is None:
            assert cell == "–", case
            continue
        status, kind, *code = documents.bare(cell).split(" ", 1 if answer.request.url.path[:3] != "/v1" else 2)
        assert message_of(answer) and answer.status_code == int(status), (case, answer.text)
        found = answer.json()
        if isinstance(found["error"], str):
            assert found["error_type"] == kind, case
        else:
            assert found["error"]["type"] == kind, case
            assert found["error"].get("code") == (code[0] if code else None), (case, answer.text)


def test_the_table_has_every_case() -> None:
    assert len(TABLE) == len(WRONG_FIELDS) + len(KEYS) + 12


@pytest.mark.parametrize("case", WRONG_FIELDS)
async def test_what_is_wrong_with_a_field(router: Router, case: str) -> None:
    answers = [None if one is None else await router.post(*one) for one in WRONG_FIELDS[case]]
    check(answers, case)
    num_answers = sum(answer is not None for answer in answers)
    text = (await router.get("/metrics")).text
    assert f"\ntgi_request_count {num_answers}\n" in text
    err = "template" if case.startswith("tools") else "validation"
    assert f'tgi_request_failure{{err="{err}"}} {num_answers}\n' in text
    router.assert_idle()


async def test_what_is_wrong_with_a_request(make_router: MakeRouter) -> None:
    router = make_router(config=KEYED)
    key = {"authorization": "Bearer secret"}
    paths = (TGI, OPENAI, ANTHROPIC)
    check([await router.post(path, raw=b"{", **key) for path in paths], "the body is not JSON")
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}):
        answers = [await router.request("POST", path, content=b"{}", headers=headers | key) for path in paths]
        check(answers, "another content type, or a compressed body")
    check([await router.post(path, raw=b" " * 100_001, **key) for path in paths], "the body is too large")
    check([await router.post(path, BODIES[path]) for path in paths], "no key, or a wrong one")
    unknown = ("/nope", "/v1/nope", "/v1/messages/nope")
    check([await router.post(path, {}, **key) for path in unknown], "no such route")
    check([None, await router.get("/v1/models/nope"), None], "no such model")
    check([await router.request("GET", path) for path in paths], "another method")
    with router.inference.take_permits(4, request_id="x"):
        check([await router.post(path, BODIES[path], **key) for path in paths], "too many requests at once")
    router.inference.is_draining = True
    check([await router.post(path, BODIES[path], **key) for path in paths], "the server is stopping")


@pytest.mark.parametrize("case", KEYS)
async def test_what_a_key_may_not_do(make_router: MakeRouter, case: str) -> None:
    router = make_router(keys=[Key(name="a", digest=digest_of(b"secret"), **KEYS[case])], clock=lambda: 5.0)
    account = router.accounts.find(b"secret")
    account.admit()
    account.prompted(2)
    paths, key = (TGI, OPENAI, ANTHROPIC), {"authorization": "Bearer secret"}
    check([await router.post(path, BODIES[path], **key) for path in paths], case)
    account.end()


async def test_failures(make_router: MakeRouter) -> None:
    paths = (TGI, OPENAI, ANTHROPIC)
    for error, case in (
        (GenerationError("out of memory"), "the generation fails"),
        (IncompleteError(), "the generation ends without a last token"),
    ):
        router = make_router(lambda request, error=error: failing("a", error=error))
        check([await router.post(path, BODIES[path]) for path in paths], case)
        router.assert_idle()
    router = make_router(templates={})
    answers = [await router.post(path, BODIES[OPENAI] if path != ANTHROPIC else BODIES[ANTHROPIC])
               for path in ("/invocations", OPENAI, ANTHROPIC)]  # fmt: skip
    check(answers, "the chat template fails")


async def test_tgis_form_on_openais_routes(make_router: MakeRouter) -> None:
    config = RouterConfig(tokenizer_name="some/model", error_format="tgi")
    router = make_router(lambda request: failing("a", error=GenerationError("boom")), config=config)
    answer = await router.post(OPENAI, body(OPENAI, max_tokens=0))
    words = "Input validation error: `max_tokens` must be > 0, or -1 for as many as fit"
    assert (answer.status_code, answer.json()) == (422, {"error": words, "error_type": "validation"})
    assert (await router.post(OPENAI, BODIES[OPENAI])).status_code == 424
    message = "Request failed during generation: boom"
    nested = {"message": message, "http_status_code": 424, "type": "generation", "code": 424}
    events = data_of((await router.post(OPENAI, body(OPENAI, stream=True))).content)
    assert events[-2] == {"error": nested, "error_type": "generation"}
    assert (await router.get("/v1/nope")).json()["error"].startswith("route /v1/nope not found")
    for path in (ANTHROPIC, "/v1/responses"):
        answer = await router.post(path, {})
        assert answer.status_code == 400 and isinstance(answer.json()["error"], dict)


async def test_a_prompt_that_is_too_long_in_the_words_of_each_api(router: Router) -> None:
    """Agents shorten the conversation where they find these words."""
    long = [{"role": "user", "content": LONG}]
    responses = await router.post("/v1/responses", {"input": LONG, "max_output_tokens": 5})
    chat = await router.post(OPENAI, {"messages": long, "max_tokens": 5})
    for answer, field in ((responses, "input"), (chat, "messages")):
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert f"`{field}` has " in error["message"]
        assert error["message"].endswith("tokens: the maximum context length is 2000 tokens (context_length_exceeded)")
    said = message_of(await router.post(ANTHROPIC, {"model": "m", "max_tokens": 5, "messages": long}))
    tokens, maximum = said.removeprefix("prompt is too long: ").removesuffix(" maximum").split(" tokens > ")
    assert int(tokens) > int(maximum) == 2000
    fits = [{"role": "user", "content": "ab " * 700}]
    answer = await router.post(OPENAI, {"messages": fits, "max_completion_tokens": 3000})
    assert "and `max_completion_tokens` asks for 3000: the maximum context length is 2048" in message_of(answer)
    said = message_of(await router.post(ANTHROPIC, {"model": "m", "max_tokens": 3000, "messages": fits}))
    assert said.startswith("input length and `max_tokens` exceed context limit: ") and " + 3000 > 2048, " in said


TOOL = {"type": "function", "function": {"name": "f"}}
OF_OPENAI: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": 3, "content": "Hi"}]}, "messages[0].role", "invalid_type"),
    ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text",
     "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text",
     "missing_required_parameter"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]", "invalid_value"),
    ({"messages": [{"role": "user", "content": LONG}]}, "messages", "context_length_exceeded"),
    ({"temperature": -1}, "temperature", "decimal_below_min_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
    ({"top_p": -0.5}, "top_p", "decimal_below_min_value"),
    ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"seed": 2**64 - 1 + 1}, "seed", "invalid_value"),
    ({"stop": ["x"] * 65}, "stop", "array_above_max_length"),
    ({"stop": [1]}, "stop[0]", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
     "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"tempreature": 1}, "tempreature", "unknown_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), OF_OPENAI, ids=[json.dumps(one)[:60] for one, *_ in OF_OPENAI])
async def test_openais_client_knows_the_field_and_the_code(
    router: Router, fields: dict[str, Any], param: str, code: str
) -> None:
    """Sent by hand and made into the exception that the client raises."""
    asked = {name: value for name, value in (BODIES[OPENAI] | fields).items() if value is not None}
    answer = await router.post(OPENAI, asked)
    client = openai.OpenAI(api_key="-", base_url="http://router/v1")
    error = client._make_status_error_from_response(answer)  # type: ignore[arg-type]
    assert isinstance(error, openai.BadRequestError), answer.text
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert is_invalid(answer) and "function-" not in error.message and "max_new_tokens" not in error.message
    assert not {"inputs", "top_n_tokens"} & set(error.message.split("`"))
    router.assert_idle()


async def test_a_number_beyond_64_bits_names_its_field(router: Router) -> None:
    for raw, field in (
        (b'{"inputs":"x","parameters":{"stop":[],"seed":' + b"9" * 5000 + b"}}", "parameters.seed"),
        (b'{"inputs":"x","parameters":{"temperature":NaN}}', "parameters.temperature"),
        (b'{"inputs":"x","parameters":{"temperature":1e999}}', "parameters.temperature"),
        (b'{"inputs":"x","a":[1,{"b":[0,1e999]}]}', "a[1].b[1]"),
    ):
        assert f"JSON body: {field}: " in (await router.refused(TGI, raw))["error"]


async def test_refusals_are_logged_with_their_reason_and_without_the_client(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    for asked, line in (
        (body(TGI, inputs=LONG), "Refused: validation reason=prompt_too_long field=inputs given="),
        (body(TGI, temprature=1), "Refused: validation reason=unknown_field"),
        (body(TGI, stop=["secret"] * 5), "Refused: validation reason=invalid_value field=stop given=5 limit=4"),
        (body(TGI, seed="secret"), "Refused: validation reason=invalid_type field=parameters"),
    ):
        caplog.clear()
        await router.post(TGI, asked)
        (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
        assert record.getMessage().startswith(line) and "secret" not in record.getMessage()
    text = (await router.get("/metrics")).text
    for reason in ("prompt_too_long", "unknown_field", "invalid_value", "invalid_type"):
        assert f'tgi_request_refused{{reason="{reason}"}} 1\n' in text


async def test_unknown_paths_and_wrong_methods_answer_json(router: Router) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404), ("POST", "/v1", 404), ("GET", "/generate", 405),
        ("DELETE", "/info", 405), ("PUT", "/v1/chat/completions", 405), ("POST", "/health", 405),
        ("POST", "/generate/", 404),
    ):  # fmt: skip
        answer = await router.request(method, path)
        assert answer.status_code == status, (method, path)
        assert status == 405 or "not found" in message_of(answer)


async def test_an_error_nobody_foresaw_says_nothing(make_router: MakeRouter) -> None:
    def script(request: Any) -> Any:
        raise ZeroDivisionError("secret")

    router = make_router(script)
    answer = await router.post("/generate", {"inputs": "Hi"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error", "error_type": "internal"}
    router.assert_idle()


async def test_nor_inside_of_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [])  # the fake runs out of events with an IndexError
    answer = await router.post("/generate_stream", {"inputs": "Hi"})
    assert data_of(answer.content) == [{"error": "internal error", "error_type": "internal"}]
    answer = await router.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    nested = {"message": "internal error", "type": "server_error", "param": None, "code": None}
    assert data_of(answer.content) == [{"error": nested, "error_type": "internal"}, "[DONE]"]
    router.assert_idle()
