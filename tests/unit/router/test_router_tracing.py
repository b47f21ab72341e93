"""The spans of HTTP requests: names, parents, attributes; and that nothing is made when nobody listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from router_fakes import Router, failing, says
from support.recorded_spans import RecordedSpans, id_of, parent_of

from router import tracing
from router.api.chat import routes as chat
from router.api.completions import routes as completions
from router.api.platforms import cloud, kserve
from router.api.tgi import routes as generate
from router.api.tgi import tokenize
from router.config import RouterConfig
from router.errors import GenerationError
from router.generation_trace import GenerationTrace
from router.request import SamplingParameters, StoppingParameters, ValidRequest
from router.tracing import RequestSpan

MakeRouter = Callable[..., Router]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "a secret"}]}
ROUTES: list[tuple[str, str, Any]] = [
    ("/generate", "generate", {"inputs": "a secret"}),
    ("/generate_stream", "generate_stream", {"inputs": "a secret"}),
    ("/", "compat_generate", {"inputs": "a secret"}),
    ("/v1/completions", "completions", {"model": "tgi", "prompt": "a secret"}),
    ("/v1/chat/completions", "chat_completions", CHAT),
    ("/v1/chat/completions", "chat_completions", CHAT | {"stream": True}),
    ("/vertex", "vertex_compatibility", {"instances": [{"inputs": "a secret"}]}),
    ("/invocations", "sagemaker_compatibility", {"inputs": "a secret"}),
]
TIMES = ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token")


@pytest.fixture
def recorded() -> RecordedSpans:
    return RecordedSpans()


@pytest.mark.parametrize(("path", "name", "body"), ROUTES)
async def test_generation_routes(
    make_router: MakeRouter, recorded: RecordedSpans, path: str, name: str, body: Any
) -> None:
    router = make_router(lambda request: says(" secret", "!", seed=7), tracing=recorded.tracing)
    answer = await router.post(path, body, traceparent=TRACEPARENT)
    assert answer.status_code == 200
    request = recorded.one(name)
    assert request.parent is not None and f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    attributes = dict(request.attributes or {})
    assert attributes["http.request.method"] == "POST" and attributes["http.response.status_code"] == 200
    assert attributes["seed"] == "7" and str(attributes["parameters"]).startswith("GenerateParameters {")
    assert all(str(attributes[time]).endswith("s") for time in TIMES)
    assert {parent_of(recorded.one(inner)) for inner in ("validate", "queued")} == {id_of(request)}
    assert "secret" not in "".join(span.to_json() for span in recorded.all())
    router.assert_idle()


async def test_other_routes(make_router: MakeRouter, recorded: RecordedSpans) -> None:
    router = make_router(tracing=recorded.tracing)
    for path in ("/info", "/v1/models", "/v1/models/tgi", "/health", "/metrics", "/docs", "/nowhere", "/a/b?c=d"):
        await router.get(path)
    await router.post("/tokenize", {"inputs": "x"})
    names = ["get_model_info", "openai_get_model_info", "openai_get_model_info", "health", "tokenize"]
    assert [span.name for span in recorded.all()] == names


def test_every_route_that_generates_has_a_name() -> None:
    families = (generate, chat, completions, tokenize, cloud, kserve)
    endpoints = [route.endpoint for family in families for route in family.routes.routes if "POST" in route.methods]
    names = [RequestSpan({"endpoint": endpoint}, None).name for endpoint in endpoints]
    assert len(set(names)) == len(names) == 13 and all(names)


async def test_kserve(make_router: MakeRouter, recorded: RecordedSpans) -> None:
    router = make_router(config=RouterConfig(tokenizer_name="m", kserve_api=True), tracing=recorded.tracing)
    await router.get("/v2/models/a/versions/1")
    inputs = [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [97]}]
    body = {"id": "1", "inputs": inputs, "parameters": {}, "outputs": [{"name": "y"}]}
    assert (await router.post("/v2/models/a/versions/1/infer", body)).status_code == 200
    assert [span.name for span in recorded.all() if span.parent is None] == ["kserve_model_infer"]


async def test_a_refusal_is_a_span_without_a_text(make_router: MakeRouter, recorded: RecordedSpans) -> None:
    router = make_router(tracing=recorded.tracing)
    await router.post("/generate", {"inputs": "x", "parameters": {"temperature": -1.5}})
    assert (recorded.one("generate").attributes or {})["http.response.status_code"] == 422
    assert recorded.one("validate").status.status_code.name == "ERROR"
    assert not recorded.named("queued") and "temperature" not in recorded.one("validate").to_json()


async def test_a_failure_ends_every_span(make_router: MakeRouter, recorded: RecordedSpans) -> None:
    router = make_router(lambda request: failing(" a", error=GenerationError("secret")), tracing=recorded.tracing)
    assert (await router.post("/generate", {"inputs": "x"})).status_code == 424
    assert recorded.one("queued").status.description == "GenerationError"
    assert sorted(span.name for span in recorded.all()) == ["generate", "queued", "validate"]
    assert "secret" not in "".join(span.to_json() for span in recorded.all())


async def test_without_a_collector_no_span_is_made(make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    router = make_router()
    monkeypatch.setattr(GenerationTrace, "__init__", lambda *_: pytest.fail("a span was made"))
    assert (await router.post("/generate", {"inputs": "x"}, traceparent=TRACEPARENT)).status_code == 200
    assert router.scheduler.last.trace is None


def test_a_generation_goes_from_queue_to_batch_once(recorded: RecordedSpans) -> None:
    request = RequestSpan({"method": "POST", "endpoint": tracing.described}, recorded.tracing)
    assert request.name == "" and request.span is not None
    trace = GenerationTrace(recorded.tracing, request.span)
    first = trace.batched()
    assert trace.batched() is first, "again after a preemption"
    trace.finish()
    trace.finish(ValueError())
    assert [span.name for span in recorded.all()] == ["queued", "infer"]
    assert recorded.one("infer").status.is_ok or recorded.one("infer").status.is_unset
    request.finish(500)
    assert len(recorded.all()) == 2, "a route without a name has no span"


async def test_attributes_of_generative_ai(make_router: MakeRouter, recorded: RecordedSpans) -> None:
    def script(_: Any) -> Any:
        *events, last = says(" one", " two")
        return [*events, replace(last, cached_tokens=2, finish_reason="stop_sequence")]

    router = make_router(script, tracing=recorded.tracing)
    asked = {"n": 2, "temperature": 0.5, "top_p": 0.25, "seed": 3, "max_tokens": 2, "model": "a secret"}
    answer = await router.post("/v1/chat/completions", CHAT | asked)
    found = gen_ai_of(recorded.one("chat_completions"))
    usage = answer.json()["usage"]
    assert found == {
        "operation.name": "chat", "provider.name": "tercet", "request.model": "some/model",
        "response.model": "some/model", "request.choice.count": 2, "request.temperature": 0.5, "request.top_p": 0.25,
        "request.seed": 4, "request.max_tokens": 2, "request.stream": False, "response.id": answer.json()["id"],
        "response.finish_reasons": ("stop", "stop"), "usage.input_tokens": usage["prompt_tokens"],
        "usage.output_tokens": usage["completion_tokens"], "usage.cache_read.input_tokens": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name", "body", "operation"),
    [
        ("/v1/completions", "completions", {"prompt": ["x", "y z"]}, "text_completion"),
        ("/v1/messages", "messages", CHAT | {"model": "m", "max_tokens": 2}, "chat"),
        ("/v1/responses", "responses", {"input": "x"}, "chat"),
        ("/generate_stream", "generate_stream", {"inputs": "x", "parameters": {"seed": 2**63}}, "text_completion"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_generative_ai_of_each_api(
    make_router: MakeRouter, recorded: RecordedSpans, path: str, name: str, body: Any, operation: str, stream: bool
) -> None:
    router = make_router(tracing=recorded.tracing)
    has_id = path != "/generate_stream"
    answer = await router.post(path, body | ({"stream": stream} if has_id else {}))
    assert answer.status_code == 200
    found = gen_ai_of(recorded.one(name))
    is_stream = stream or not has_id
    assert (found["operation.name"], found["request.stream"]) == (operation, is_stream)
    assert found.get("response.id", "") in answer.text and ("response.id" in found) is has_id
    assert ("response.time_to_first_chunk" in found) is is_stream and "request.seed" not in found
    number = len(body.get("prompt", "x"))
    assert found["response.finish_reasons"] == ("length",) * number
    assert found["usage.output_tokens"] == 2 * number and found.get("request.choice.count", 1) == number


async def test_what_generates_nothing_has_no_such_attributes(make_router: MakeRouter, recorded: RecordedSpans) -> None:
    router = make_router(tracing=recorded.tracing)
    await router.post("/tokenize", {"inputs": "x"})
    await router.post("/v1/completions", {"prompt": "x", "temperature": -1.5})
    assert gen_ai_of(recorded.one("tokenize")) == gen_ai_of(recorded.one("completions")) == {}


def gen_ai_of(span: Any) -> dict[str, Any]:
    return {
        name.removeprefix("gen_ai."): value for name, value in span.attributes.items() if name.startswith("gen_ai.")
    }


async def test_several_generations_have_spans_each(make_router: MakeRouter, recorded: RecordedSpans) -> None:
    router = make_router(tracing=recorded.tracing)
    await router.post("/v1/chat/completions", CHAT | {"n": 3})
    request = recorded.one("chat_completions")
    for name in ("validate", "queued"):
        assert [parent_of(span) for span in recorded.named(name)] == [id_of(request)] * 3


def test_parameters_are_told_without_a_word_of_the_clients() -> None:
    sampling = SamplingParameters(
        top_k=7, absolute_frequency_penalty=0.5, logit_bias=((1, 2.0),), grammar="secret", grammar_kind="regex", seed=4
    )
    stopping = StoppingParameters(max_new_tokens=3, stop_sequences=("secret", "x"))
    request = ValidRequest(
        inputs="secret",
        num_characters=6,
        input_ids=(1,),
        input_length=1,
        truncate=9,
        sampling=sampling,
        stopping=stopping,
    )
    told = tracing.described(request)
    assert "secret" not in told and "seed" not in told
    for one in fields(SamplingParameters):
        assert (f" {one.name}: " in told) == (one.name not in ("seed", "grammar_kind")), one.name
    for part in (
        "top_k: 7,",
        "absolute_frequency_penalty: 0.5,",
        "grammar: regex,",
        "stop_sequences: 2,",
        "logit_bias: 1 }",
    ):
        assert part in told
