"""Health, info, models, metrics, tokenize, keys, CORS, request ids, the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, says
from tokenizers import Tokenizer, models

from router.config import RouterConfig

MakeRouter = Callable[..., Router]


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
async def test_health(router: Router, path: str) -> None:
    for method in ("GET", "HEAD"):
        answer = await router.request(method, path)
        assert (answer.status_code, answer.content) == (200, b"")
    router.scheduler.healthy = False
    answer = await router.get(path)
    assert answer.status_code == 503
    assert answer.json() == {"error": "unhealthy", "error_type": "healthcheck"}


async def test_info_has_tgis_keys_in_tgis_order_and_ours_behind(router: Router) -> None:
    answer = (await router.get("/info")).json()
    assert list(answer) == [
        "model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of", "max_stop_sequences",
        "max_input_tokens", "max_total_tokens", "validation_workers", "max_client_batch_size", "router", "version",
        "sha", "docker_label", "model_dtype", "model_device_type", "waiting_served_ratio", "max_batch_total_tokens",
        "max_waiting_tokens", "max_batch_size", "tercet_version",
    ]  # fmt: skip
    assert answer["model_id"] == "some/model" and answer["version"] == "3.3.7"
    assert answer["router"] == "text-generation-router" and answer["max_input_tokens"] == 2000


async def test_models(router: Router) -> None:
    card = {
        "id": "some/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "some/model",
        "max_model_len": 2048,
    }
    assert (await router.get("/v1/models")).json() == {"object": "list", "data": [card]}
    for name in ("some/model", "some%2Fmodel", "tgi"):
        assert (await router.get(f"/v1/models/{name}")).json() == card
    answer = await router.get("/v1/models/other/model")
    assert answer.status_code == 404 and answer.json()["error_type"] == "not_found"


async def test_metrics_after_a_scripted_run(router: Router) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    await router.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2000}})
    await router.post("/generate_stream", {"inputs": "x"})
    await router.post("/v1/chat/completions", chat)
    await router.post("/v1/chat/completions", chat | {"n": 2})
    await router.post("/generate", {"inputs": ""})
    await router.post("/tokenize", {"inputs": "x"})
    answer = await router.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert "tgi_request_count 5" in lines, "once for each request that may generate"
    assert "tgi_request_success 5" in lines, "once for each generation"
    assert 'tgi_request_failure{err="validation"} 1' in lines
    for name in (
        "duration", "validation_duration", "queue_duration", "inference_duration", "mean_time_per_token_duration",
        "generated_tokens", "input_length", "max_new_tokens", "time_to_first_token_duration",
        "inter_token_duration",
    ):  # fmt: skip
        assert f"tgi_request_{name}_count 5" in lines, name
    assert "tgi_request_generated_tokens_sum 10" in lines
    assert "_total " not in answer.text and "_created" not in answer.text


async def test_tokenize_counts_bytes(router: Router) -> None:
    text = "fox é 日本 🙂"
    spans = (await router.post("/tokenize", {"inputs": text, "parameters": {"truncate": 1}})).json()
    assert spans[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
    raw = text.encode()
    assert all(span["text"] == raw[span["start"] : span["stop"]].decode() for span in spans)
    assert spans[-1]["stop"] == len(raw)
    starts = [span["start"] for span in spans[1:]]
    assert starts == sorted(starts)
    answer = await router.post("/tokenize", {"inputs": ""})
    assert answer.status_code == 422


async def test_text_that_the_tokenizer_refuses(make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    wordwise = Tokenizer(models.WordLevel({"known": 0}, unk_token="<unk>"))  # which it does not have
    monkeypatch.setattr("router_fakes.Tokenizer.from_str", lambda source: wordwise)
    router = make_router()
    for path in ("/tokenize", "/generate"):
        answer = await router.post(path, {"inputs": "unheard of"})
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"].startswith("Input validation error: tokenizer error: ")


async def test_the_api_key_guards_every_post(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(api_key="Sesame"))
    for path in (
        "/",
        "/generate",
        "/generate_stream",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/nothing",
    ):
        for header in (
            {},
            {"authorization": "Bearer sesame"},
            {"authorization": "Sesame"},
            {"authorization": "Basic Sesame"},
        ):
            answer = await router.post(path, {"inputs": "x"}, **header)
            assert answer.status_code == 401, (path, header)
            assert answer.json()["error_type"] == "unauthorized"
    for scheme in ("Bearer", "bearer"):
        assert (await router.post("/generate", {"inputs": "x"}, authorization=f"{scheme} Sesame")).status_code == 200
    for path in ("/", "/health", "/ping", "/info", "/metrics", "/v1/models", "/docs"):
        assert (await router.get(path)).status_code == 200


async def test_no_route_that_takes_a_body_is_open(make_router: MakeRouter) -> None:
    config = RouterConfig(
        api_key="Sesame", kserve_api=True, aip_predict_route="/custom/predict", aip_health_route="/custom/health"
    )
    router = make_router(config=config)
    checked = 0
    routes = list(router.app.routes)
    for route in routes:
        if (included := getattr(route, "original_router", None)) is not None:
            routes.extend(included.routes)
        path = re.sub(r"{.*?}", "x", getattr(route, "path", ""))
        for method in getattr(route, "methods", None) or ():
            if method not in ("GET", "HEAD"):
                checked += 1
                answer = await router.request(method, path, json={"inputs": "x"})
                assert answer.status_code == (401 if method == "POST" else 404), (method, path)
    assert checked > 10
    for path in ("/debug", "/debug/pprof", "/profile", "/start_profile", "/shutdown", "/v1/load_lora_adapter"):
        assert (await router.get(path)).status_code == 404
        assert (await router.post(path, {}, authorization="Bearer Sesame")).status_code == 404


async def test_the_key_is_compared_in_constant_time(make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr("router.server.app.hmac.compare_digest", compare)
    router = make_router(config=RouterConfig(api_key="Sesame"))
    for given in ("Bearer x", "Bearer Sesam", "Basic Sesame", "Bearer Sesame ", "Bearer  Sesame", ""):
        assert (await router.post("/generate", {"inputs": "x"}, authorization=given)).status_code == 401
    assert len(compared) == 6, "always, and whole"


async def preflight(router: Router, origin: str) -> Any:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return await router.request("OPTIONS", "/v1/chat/completions", headers=headers)


async def test_cors(make_router: MakeRouter) -> None:
    answer = await preflight(make_router(), "http://a.example")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    router = make_router(config=RouterConfig(cors_allow_origin=("http://a.example",), api_key="k"))
    answer = await preflight(router, "http://a.example")
    assert answer.headers["access-control-allow-origin"] == "http://a.example"
    assert (await preflight(router, "http://b.example")).status_code == 400
    answer = await router.post("/generate", {"inputs": "x"}, origin="http://a.example")
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "http://a.example"


async def test_request_ids_come_back(router: Router) -> None:
    for path in ("/generate", "/generate_stream", "/nothing"):
        answer = await router.post(path, {"inputs": "x"}, x_request_id="abc-1")
        assert answer.headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 129):
        got = (await router.post("/generate", {"inputs": "x"}, x_request_id=bad)).headers["x-request-id"]
        assert got != bad and len(got) == 32
    ids = {(await router.get("/info")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_success_is_logged_without_the_prompt(make_router: MakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    router = make_router(lambda request: says(" secret answer"))
    with caplog.at_level("INFO", logger="router"):
        await router.post("/generate", {"inputs": "secret question"}, x_request_id="abc")
    (record,) = [record for record in caplog.records if record.message == "Success"]
    fields = vars(record)
    assert fields["request_id"] == "abc" and fields["generated_tokens"] == 1
    for name in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token"):
        assert fields["span"][name].endswith("s")
    assert fields["span"]["name"] == "generate" and fields["spans"] == [fields["span"]]
    assert not any("secret" in str(value) for record in caplog.records for value in vars(record).values())


async def test_prompts_and_outputs_at_debug_are_cut(make_router: MakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    router = make_router(lambda request: says(" y" * 1000))
    with caplog.at_level("DEBUG", logger="router"):
        await router.post("/generate", {"inputs": "x" * 1500})
        await router.post("/generate", {"inputs": "x", "parameters": {"temperature": -1.5}})
    messages = [record.message for record in caplog.records if record.name.startswith("router")]
    assert "Input: " + "x" * 1000 in messages and "Output: " + " y" * 500 in messages
    (refusal,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert refusal.message == "Refused: validation" and vars(refusal)["span"] == {"name": "generate"}
    assert any("`temperature`" in message for message in messages)


async def test_the_openapi_document_names_every_body(router: Router) -> None:
    document = (await router.get("/api-doc/openapi.json")).json()
    paths = document["paths"]
    for path in (
        "/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/tokenize", "/chat_tokenize",
        "/vertex",
    ):  # fmt: skip
        (content,) = paths[path]["post"]["requestBody"]["content"].values()
        schema = content["schema"].get("allOf", [content["schema"]])[0]  # a stream takes less than the whole body
        name = schema["$ref"].rpartition("/")[2]
        assert name in document["components"]["schemas"]
    (content,) = paths["/invocations"]["post"]["requestBody"]["content"].values()
    names = [one["$ref"].rpartition("/")[2] for one in content["schema"]["anyOf"]]
    assert names == ["CompatBody", "ChatBody", "CompletionBody"]
    assert {"get", "post"} <= paths["/"].keys()
    assert "swagger" in (await router.get("/docs")).text.lower()
