"""Health, info, models, metrics, the OpenAPI document, and what the log says of a request."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from importlib.metadata import version

import pytest
from router_fakes import Router, message_of, says

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


async def test_props_have_what_clients_of_llama_cpp_read(make_router: MakeRouter) -> None:
    router = make_router(sampling_defaults={"temperature": 0.5, "repetition_penalty": 1.1})
    answer = (await router.get("/props")).json()
    settings = answer["default_generation_settings"]
    assert settings == {"n_ctx": 2048, "params": {"temperature": 0.5, "repeat_penalty": 1.1}}
    assert (answer["total_slots"], answer["model_path"]) == (4, "some/model")
    assert "<|assistant|>" in answer["chat_template"]
    assert answer["modalities"] == {"vision": False, "audio": False}
    assert (await make_router(templates={}).get("/props")).json()["chat_template"] == ""


async def test_info_has_tgis_keys_in_tgis_order_and_ours_behind(router: Router) -> None:
    answer = (await router.get("/info")).json()
    assert list(answer) == [
        "model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of", "max_stop_sequences",
        "max_input_tokens", "max_total_tokens", "validation_workers", "max_client_batch_size", "router", "version",
        "sha", "docker_label", "model_dtype", "model_device_type", "waiting_served_ratio", "max_batch_total_tokens",
        "max_waiting_tokens", "max_batch_size", "tercet_version", "kv_cache_dtype", "quantize", "speculate",
        "speculator",
        "tool_call_parser", "reasoning_parser", "quantization", "has_chat_template", "reads_images",
        "sampling_defaults",
    ]  # fmt: skip
    assert answer["model_id"] == "some/model" and answer["version"] == "3.3.7"
    assert (answer["kv_cache_dtype"], answer["quantize"]) == ("float32", "gptq")
    assert (answer["speculate"], answer["speculator"]) == (3, None)
    assert (answer["quantization"], answer["has_chat_template"], answer["reads_images"]) == ("gptq", True, False)
    assert (answer["tool_call_parser"], answer["reasoning_parser"]) == ("tgi", "none")
    assert answer["router"] == "text-generation-router" and answer["max_input_tokens"] == 2000


async def test_a_line_for_each_request(make_router: MakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    router = make_router(lambda request: says(" a", " b"))
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
    await router.post("/generate", body)
    assert "router.requests" not in {record.name for record in caplog.records}
    caplog.set_level(logging.DEBUG, "router.requests")
    await router.post("/generate", body)
    await router.post("/generate", {"inputs": ""})
    await router.get("/health")
    await router.get("/no%0Awhere" + "x" * 100)
    lines = [record.getMessage() for record in caplog.records if record.name == "router.requests"]
    assert len(lines) == 3
    number = r"\d+\.\d+"
    done = rf"200 POST /generate  \d tokens in, 2 out  {number} s  queued {number} s, {number} ms a token"
    assert re.fullmatch(done, lines[0]), lines[0]
    assert re.fullmatch(rf"422 POST /generate  validation reason=prompt_empty field=inputs  {number} s", lines[1])
    assert re.fullmatch(rf"404 GET /no\\nwherex+  {number} s", lines[2]) and len(lines[2]) < 110


async def test_version(router: Router) -> None:
    assert (await router.get("/version")).json() == {"version": version("tercet"), "tgi_version": "3.3.7"}


async def test_the_document_under_the_usual_name(router: Router) -> None:
    assert (await router.get("/openapi.json")).json() == (await router.get("/api-doc/openapi.json")).json()


async def test_models(router: Router) -> None:
    card = {
        "id": "some/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "some/model",
        "max_model_len": 2048,
        "sampling_defaults": {},
    }
    for path in ("/v1/models", "/v1/models/"):
        assert (await router.get(path)).json() == {"object": "list", "data": [card]}
    for name in ("some/model", "some%2Fmodel", "tgi"):
        assert (await router.get(f"/v1/models/{name}")).json() == card
    answer = await router.get("/v1/models/other/model")
    assert answer.status_code == 404 and answer.json()["error_type"] == "not_found"


async def test_models_as_anthropics_clients_and_with_defaults(make_router: MakeRouter) -> None:
    router = make_router(sampling_defaults={"temperature": 0.6})
    assert (await router.get("/v1/models")).json()["data"][0]["sampling_defaults"] == {"temperature": 0.6}
    headers = {"anthropic-version": "2023-06-01"}
    one = {"type": "model", "id": "some/model", "display_name": "some/model", "created_at": "2023-11-14T22:13:20Z"}
    listed = (await router.request("GET", "/v1/models", headers=headers)).json()
    assert listed == {"data": [one], "first_id": "some/model", "last_id": "some/model", "has_more": False}
    assert (await router.request("GET", "/v1/models/some/model", headers=headers)).json() == one


async def test_models_under_names_of_the_operator(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(served_model_name=("mine", "also-mine")))
    listed = (await router.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["mine", "also-mine"]
    assert (await router.get("/v1/models/also-mine")).json()["id"] == "also-mine"
    assert (await router.get("/v1/models/tgi")).json()["id"] == "mine"
    refused = await router.get("/v1/models/some/model")
    assert refused.status_code == 404 and "this server serves mine, also-mine" in message_of(refused)
    assert (await router.get("/info")).json()["model_id"] == "bigscience/bloom"  # the id, whatever the names
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert (await router.post("/v1/chat/completions", chat)).json()["model"] == "mine"
    assert (await router.post("/v1/completions", {"model": "also-mine", "prompt": "x"})).json()["model"] == "mine"


async def test_a_model_in_a_folder_has_the_folders_name(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(" a"), config=RouterConfig(tokenizer_name="/models/Some-Model.Q4_1.gguf"))
    assert [card["id"] for card in (await router.get("/v1/models")).json()["data"]] == ["Some-Model.Q4_1"]
    for name in ("Some-Model.Q4_1", "tgi", "%2Fmodels%2FSome-Model.Q4_1.gguf"):
        assert (await router.get(f"/v1/models/{name}")).json()["id"] == "Some-Model.Q4_1"
    assert (await router.get("/info")).json()["model_id"] == "/models/Some-Model.Q4_1.gguf"


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
    assert refusal.message == "Refused: validation reason=invalid_value field=temperature given=-1.5 limit=0"
    assert vars(refusal)["span"] == {"name": "generate"}
    assert any("`temperature`" in message for message in messages)


async def test_the_openapi_document_names_every_body(router: Router) -> None:
    document = (await router.get("/api-doc/openapi.json")).json()
    paths = document["paths"]
    for path in (
        "/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/tokenize", "/chat_tokenize",
        "/vertex",
    ):  # fmt: skip
        (content,) = paths[path]["post"]["requestBody"]["content"].values()
        schema = content["schema"]
        schema = schema.get("allOf", schema.get("anyOf", [schema]))[0]  # a stream takes less than the whole body
        name = schema["$ref"].rpartition("/")[2]
        assert name in document["components"]["schemas"]
    (content,) = paths["/invocations"]["post"]["requestBody"]["content"].values()
    assert content["schema"] == {"$ref": "#/components/schemas/SagemakerRequest"}
    bodies = document["components"]["schemas"]["SagemakerRequest"]["anyOf"]
    names = [one["$ref"].rpartition("/")[2] for one in bodies]
    assert names == ["CompatGenerateRequest", "ChatRequest", "CompletionRequest"]
    assert {"get", "post"} <= paths["/"].keys()
    assert "swagger" in (await router.get("/docs")).text.lower()
