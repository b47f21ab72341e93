"""The routes of SageMaker (`/invocations`) and Vertex AI (`/vertex`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import huggingface_hub
import openai
import pytest
from router_fakes import Router, data_of, failing, is_invalid, message_of, says

from router.config import RouterConfig, check
from router.errors import GenerationError, StartupError

MakeRouter = Callable[..., Router]

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}

RENDERED = "<|user|>Hello\n<|assistant|>"


async def test_invocations_are_answered_by_the_route_of_their_shape(router: Router) -> None:
    native: dict[str, Any] = {"inputs": "Hi", "parameters": {"seed": 3, "return_full_text": False}}
    answer = await router.post("/invocations", native)
    assert answer.json() == [{"generated_text": " one two"}]
    assert answer.headers["x-prompt-tokens"] == str(router.scheduler.last.input_length)
    assert router.scheduler.last.sampling.seed == 3
    assert (await router.post("/invocations", {"inputs": "Hi"})).json() == [{"generated_text": "Hi one two"}]
    answer = await router.post("/invocations", CHAT)
    assert answer.json()["object"] == "chat.completion" and router.scheduler.last.inputs == RENDERED
    answer = await router.post("/invocations", {"prompt": ["a", "b"]})
    assert answer.json()["object"] == "text_completion" and len(answer.json()["choices"]) == 2
    assert (await router.post("/invocations", {"inputs": None} | CHAT)).json()["object"] == "chat.completion"
    both = native | {"prompt": "x"} | CHAT
    assert isinstance((await router.post("/invocations", both)).json(), list), "`inputs` come first"
    fallback = {"inputs": 1, "prompt": "x"}
    assert (await router.post("/invocations", fallback)).json()["object"] == "text_completion"
    assert "tgi_request_count 7" in (await router.get("/metrics")).text
    router.assert_idle()


async def test_invocations_stream(router: Router) -> None:
    events = data_of((await router.post("/invocations", {"inputs": "Hi", "stream": True})).content)
    assert events[-1]["generated_text"] == "Hi one two"
    for asked in (CHAT, {"prompt": "x"}):
        assert data_of((await router.post("/invocations", asked | {"stream": True})).content)[-1] == "[DONE]"
    router.assert_idle()


async def test_clients_of_huggingface_hub_and_openai(make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    router = make_router()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it refuses the loopback too
    async with router.listening() as port:
        url = f"http://127.0.0.1:{port}"
        async with huggingface_hub.AsyncInferenceClient(f"{url}/invocations") as client:
            assert await client.text_generation("Hi", return_full_text=False) == " one two"
            pieces = [piece async for piece in await client.text_generation("Hi", stream=True)]
            assert pieces == [" one", " two"]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as openai_client:
            with pytest.raises(openai.NotFoundError) as refused:
                await openai_client.embeddings.create(model="tgi", input="Hi")
            assert "/v1/completions" in refused.value.response.json()["error"]["message"]
    router.assert_idle()


@pytest.mark.parametrize(
    ("raw", "status", "word"),
    [
        (b"{}", 422, "`inputs`, `messages`, `prompt`"),
        (b"[]", 422, "`inputs`"),
        (b'{"inputs":null}', 422, "`inputs`"),
        (b'{"inputs":["a"]}', 422, "inputs"),
        (b'{"inputs":"a","parameters":{"seed":"x"}}', 422, "parameters.seed"),
        (b'{"messages":[]}', 422, "messages"),
        (b'{"messages":[{"role":"user","content":"x"}],"n":"2"}', 422, "n:"),
        (b'{"prompt":[]}', 422, "prompt"),
        (b'{"inputs":1,"messages":1}', 422, "inputs"),
        (b"{", 400, "JSON"),
        (b'{"inputs":"' + b"a" * 70_000 + b'","stream":1}', 422, "stream"),
    ],
)
async def test_invocations_of_no_shape_say_what_is_wrong(router: Router, raw: bytes, status: int, word: str) -> None:
    answer = await router.post("/invocations", raw=raw)
    assert answer.status_code == status and list(answer.json()) == ["error", "error_type"]
    assert word in message_of(answer)
    assert router.scheduler.submitted == []


async def test_vertex(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(" to", f" {request.inputs}", "END", reason="stop_sequence"))
    instances = [
        {"inputs": "a"},
        {"inputs": "b", "parameters": {"max_new_tokens": 7, "seed": 5, "temperature": 0.5, "stop": ["END"]}},
        {"inputs": "c", "parameters": {"return_full_text": True, "do_sample": False, "details": True}},
        CHAT | {"stream": True, "temperature": 0, "max_tokens": 9, "stop": "END"},
    ]
    answer = await router.post("/vertex", {"instances": instances})
    assert answer.status_code == 200
    assert answer.json() == {"predictions": [" to aEND", " to bEND", "c to cEND", f" to {RENDERED}"]}
    first, second, third, chat = router.scheduler.submitted
    assert first.sampling.do_sample and not first.decoder_input_details
    assert second.stopping.max_new_tokens == 7 and second.sampling.seed == 5 and second.sampling.temperature == 0.5
    assert second.sampling.do_sample, "as TGI, which always samples here"
    assert not third.sampling.do_sample
    assert chat.stopping.max_new_tokens == 9 and not chat.sampling.do_sample
    assert "tgi_request_count 1" in (await router.get("/metrics")).text
    router.assert_idle()


async def test_vertex_instances_may_ask_for_chat_completions(router: Router) -> None:
    asked = CHAT | {"@requestFormat": "chatCompletions", "logprobs": True}
    first, second = (await router.post("/vertex", {"instances": [asked, CHAT]})).json()["predictions"]
    assert first["object"] == "chat.completion" and first["choices"][0]["message"]["content"] == second == " one two"
    assert first["usage"]["completion_tokens"] == len(first["choices"][0]["logprobs"]["content"]) == 2
    refused = await router.post("/vertex", {"instances": [CHAT | {"@requestFormat": "textCompletions"}]})
    assert is_invalid(refused) and "instances[0].@requestFormat" in message_of(refused)
    router.assert_idle()


async def test_vertex_renders_no_chat_before_there_is_room(
    make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = make_router()
    rendered: list[object] = []
    monkeypatch.setattr("router.api.chat.chat.request_of", lambda *args: rendered.append(args))
    answer = await router.post("/vertex", {"instances": [CHAT] * 5})
    assert is_invalid(answer) and "up to 4 generations" in message_of(answer)
    assert rendered == []
    router.assert_idle()


async def test_vertex_honours_best_of(make_router: MakeRouter) -> None:
    answers = [says("worse", " still"), says("better"), says("other")]
    router = make_router(lambda request: answers.pop(0))
    instances = [{"inputs": "a", "parameters": {"best_of": 2}}, {"inputs": "b"}]
    got = (await router.post("/vertex", {"instances": instances})).json()
    assert got == {"predictions": ["better", "other"]}
    router.assert_idle()


@pytest.mark.parametrize(
    ("body", "error_type", "word"),
    [
        ({"instances": []}, "Input validation error", "instances"),
        ({}, "validation", "instances"),
        ({"instances": [CHAT], "parameters": {"temperature": 0}}, "validation", "give each instance its own"),
        ({"instances": "x"}, "validation", "instances"),
        ({"instances": ["x"]}, "validation", "instances[0]: "),
        ({"instances": [{}]}, "validation", "messages"),
        ({"instances": [{"inputs": 1}]}, "validation", "instances[0].inputs: "),
        ({"instances": [{"inputs": "a", "parameters": {"seed": -1}}]}, "validation", "parameters.seed"),
        ({"instances": [{"messages": []}]}, "validation", "messages"),
        ({"instances": [{"inputs": "a"}, {"inputs": ""}]}, "validation", "cannot be empty"),
        ({"instances": [{"inputs": "a", "parameters": {"top_p": 2.0}}]}, "validation", "top_p"),
        ({"instances": [{"inputs": "a", "parameters": {"best_of": 3}}]}, "validation", "best_of"),
        ({"instances": [CHAT | {"n": 2}]}, "validation", "`n`"),
        ({"instances": [{"inputs": "a"}] * 5}, "batch size exceeded", "up to 4 generations"),
    ],
)
async def test_vertex_refuses_with_the_cause(router: Router, body: Any, error_type: str, word: str) -> None:
    answer = await router.post("/vertex", body)
    assert is_invalid(answer), answer.text
    assert answer.json()["error_type"] == error_type and word in message_of(answer)
    router.assert_idle()


@pytest.mark.parametrize(
    ("path", "predict"), [("/vertex", None), ("/predict", "/predict"), ("/x:predict", "/x:predict")]
)
async def test_failures_and_overload_keep_their_status(make_router: MakeRouter, path: str, predict: str | None) -> None:
    answers = [[None], failing("a", error=GenerationError("boom"))]
    router = make_router(lambda request: answers.pop(0), config=RouterConfig(aip_predict_route=predict))
    answer = await router.post(path, {"instances": [{"inputs": "a"}, {"inputs": "b"}]})
    assert answer.status_code == 424 and answer.json()["error_type"] == "generation"
    assert router.inference.permit_pool.acquire(4)
    answer = await router.post(path, {"instances": [{"inputs": "a"}]})
    assert answer.status_code == 429 and answer.json()["error_type"] == "overloaded"


async def test_vertex_variables(make_router: MakeRouter) -> None:
    config = RouterConfig(aip_predict_route="/generate", aip_health_route="/isalive", api_key="k")
    router = make_router(config=config)
    body = {"instances": [{"inputs": "a"}]}
    assert (await router.post("/generate", body)).status_code == 401
    answer = await router.post("/generate", body, authorization="Bearer k")
    assert answer.json() == {"predictions": [" one two"]}, "what the operator asked for wins"
    for method in ("GET", "HEAD"):
        assert (await router.request(method, "/isalive")).status_code == 200
    router.scheduler.healthy = False
    assert (await router.get("/isalive")).status_code == 503
    assert RouterConfig(port=80).listening_port == 80
    assert RouterConfig(port=80, aip_http_port=8080).listening_port == 8080
    for route in ("predict", "/{x}", "/p?x"):
        with pytest.raises(StartupError, match="--aip-predict-route"):
            check(RouterConfig(aip_predict_route=route))
        with pytest.raises(StartupError, match="--aip-health-route"):
            check(RouterConfig(aip_health_route=route))
