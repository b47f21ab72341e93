"""The HTTP interface as its users count on it, check by check, through a whole server with small limits.

Unit tests hold every row of the tables; here stands what only the real parts together can show.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from support.acceptance import KEY, MAX_CONCURRENT, MAX_INPUT, MAX_TOTAL, RARE, chat, generate, text_of
from support.answers import events_of, ok, refused
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e


def test_parameters_decide_whether_a_request_samples(client: httpx.Client) -> None:
    details = {"details": True, "max_new_tokens": 3}
    assert ok(generate(client, **details))["details"]["seed"] is None
    assert ok(generate(client, **details)) == ok(generate(client, **details))
    sampled = ok(generate(client, **details, do_sample=True))["details"]
    assert isinstance(sampled["seed"], int) and sampled["seed"] >= 0
    one, other = (ok(client.post("/generate", json={"inputs": "Hello"}))["generated_text"] for _ in range(2))
    assert one != other, "without `parameters` it samples"


def test_details(client: httpx.Client) -> None:
    keys = ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert list(ok(generate(client, max_new_tokens=2))) == ["generated_text"]
    details = ok(generate(client, max_new_tokens=2, details=True))["details"]
    assert list(details) == keys and details["prefill"] == []
    details = ok(generate(client, max_new_tokens=2, details=True, top_n_tokens=3))["details"]
    assert list(details) == [*keys, "top_tokens"]
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert list(token) == list(top[0]) == ["id", "text", "logprob", "special"]
        assert top[0]["id"] == token["id"] and top[0]["logprob"] == pytest.approx(token["logprob"]), "greedy"
        assert [one["logprob"] for one in top] == sorted((one["logprob"] for one in top), reverse=True)
    answer = ok(generate(client, max_new_tokens=4, best_of=2, do_sample=True, details=True, top_n_tokens=1))
    details = answer["details"]
    assert list(details) == [*keys, "best_of_sequences", "top_tokens"]
    (other,) = details["best_of_sequences"]
    assert list(other) == ["generated_text", *keys, "top_tokens"] and other["seed"] != details["seed"]

    def mean(tokens: list[Any]) -> float:
        return sum(token["logprob"] for token in tokens) / len(tokens)

    assert mean(details["tokens"]) >= mean(other["tokens"])


def test_the_limits_are_inclusive(client: httpx.Client) -> None:
    longest = text_of(client, MAX_INPUT)
    answer = generate(client, longest, max_new_tokens=1)
    assert ok(answer) and answer.headers["x-prompt-tokens"] == str(MAX_INPUT)
    words = f"`inputs` must have less than {MAX_INPUT} tokens. Given: {MAX_INPUT + 1}"
    refused(generate(client, longest + RARE, max_new_tokens=1), 422, "validation", words)
    ok(generate(client, longest, max_new_tokens=MAX_TOTAL - MAX_INPUT))
    words = (
        f"`inputs` tokens + `max_new_tokens` must be <= {MAX_TOTAL}. "
        f"Given: {MAX_INPUT} `inputs` tokens and {MAX_TOTAL - MAX_INPUT + 1} `max_new_tokens`"
    )
    refused(generate(client, longest, max_new_tokens=MAX_TOTAL - MAX_INPUT + 1), 422, "validation", words)
    error = refused(generate(client, "x" * 90_000), 422, "validation")
    assert re.search(r"Given: \d+ or more `inputs` tokens", error), "too many bytes, whatever the tokens are"
    for body in ({"inputs": ""}, {"inputs": "x", "parameters": {"top_p": 0.0}}):
        for path in ("/", "/generate", "/generate_stream"):
            refused(client.post(path, json=body), 422, "validation", "Input validation error: `")


async def test_long_generations_are_exact(server: RunningServer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, timeout=240, headers=headers) as client:
        spans = (await client.post("/tokenize", json={"inputs": RARE * 9})).json()
        inputs = RARE * (19 - len(spans))  # ten tokens

        async def count(number: int) -> tuple[int, str]:
            parameters = {"max_new_tokens": number, "ignore_eos": True, "details": True}
            answer = await client.post("/generate", json={"inputs": inputs, "parameters": parameters})
            details = ok(answer)["details"]
            assert len(details["tokens"]) == details["generated_tokens"] == int(answer.headers["x-generated-tokens"])
            return details["generated_tokens"], details["finish_reason"]

        counts = await asyncio.gather(count(1500), count(MAX_TOTAL - 10), count(100_000))
    assert counts == [(1500, "length"), (MAX_TOTAL - 10, "length"), (MAX_TOTAL - 10, "length")]


def test_truncation_keeps_the_last_tokens(client: httpx.Client) -> None:
    inputs = "The quick brown fox jumps over the lazy dog"
    whole = [span["id"] for span in ok(client.post("/tokenize", json={"inputs": inputs}))]
    answer = generate(client, inputs, truncate=5, decoder_input_details=True, max_new_tokens=1)
    kept = [token["id"] for token in ok(answer)["details"]["prefill"]]
    assert len(kept) == 5 and kept[-4:] == whole[-4:]
    assert answer.headers["x-prompt-tokens"] == "5" and answer.headers["x-compute-characters"] == str(len(inputs))


def test_headers(client: httpx.Client) -> None:
    timed = {
        "x-compute-type", "x-compute-characters", "x-total-time", "x-validation-time", "x-queue-time",
        "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens",
    }  # fmt: skip
    for answer in (
        generate(client, max_new_tokens=3),
        client.post("/", json={"inputs": "Hello", "parameters": {"max_new_tokens": 3}}),
        client.post("/invocations", json={"inputs": "Hello", "parameters": {"max_new_tokens": 3}}),
        chat(client),
    ):
        assert answer.status_code == 200 and timed <= answer.headers.keys()
        assert all(answer.headers[name].isdigit() for name in timed - {"x-compute-type"})
        total_s = float(answer.headers["x-compute-time"])
        assert int(total_s * 1000) == int(answer.headers["x-total-time"]), "seconds and milliseconds"
    answer = client.post("/v1/completions", json={"prompt": ["Hello", "Hello"], "max_tokens": 3})
    assert timed <= answer.headers.keys() and "x-compute-time" not in answer.headers
    assert answer.headers["x-compute-characters"] == "10", "the sum over the prompts"
    data = {"name": "a", "shape": [1], "datatype": "BYTES", "data": list(b"Hello")}
    few = {"max_new_tokens": 2}
    for path, body in (
        ("/tokenize", {"inputs": "Hello"}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/vertex", {"instances": [{"inputs": "Hello", "parameters": few}]}),
        ("/v2/models/m/versions/1/infer", {"id": "1", "inputs": [data], "outputs": [{"name": "a"}], "parameters": few}),
    ):
        answer = client.post(path, json=body)
        assert ok(answer) and not (timed | {"x-compute-time"}) & answer.headers.keys(), path
    answer = generate(client, temperature=0)
    assert answer.status_code == 422 and not timed & answer.headers.keys()
    for path in ("/", "/health", "/ping", "/info", "/metrics", "/v1/models", "/docs", "/api-doc/openapi.json", "/v2"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path


async def test_no_permit_is_429_on_every_route_and_comes_back_with_a_disconnect(server: RunningServer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    long = {"inputs": "Hello", "parameters": {"max_new_tokens": 1900, "ignore_eos": True}}
    messages = [{"role": "user", "content": "x"}]
    data = {"name": "a", "shape": [1], "datatype": "BYTES", "data": [72]}
    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
        held = [
            client.stream("POST", "/generate_stream", json=long) for _ in range(MAX_CONCURRENT)
        ]  # fmt: skip
        for stream in held:
            opened = await stream.__aenter__()
            assert opened.status_code == 200
        for path, body in (
            ("/", {"inputs": "x"}),
            ("/", {"inputs": "x", "stream": True}),
            ("/generate", {"inputs": "x"}),
            ("/generate_stream", {"inputs": "x"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/chat/completions", {"messages": messages, "stream": True}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": "x", "stream": True}),
            ("/invocations", {"prompt": "x"}),
            ("/vertex", {"instances": [{"inputs": "x"}]}),
            ("/v2/models/m/versions/1/infer", {"id": "1", "inputs": [data], "outputs": [{"name": "a"}]}),
        ):
            answer = await client.post(path, json=body)
            assert refused(answer, 429, "overloaded") == "Model is overloaded"
            assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert (await client.post("/tokenize", json={"inputs": "x"})).status_code == 200, "takes no permit"
        assert (await client.get("/health")).status_code == 200
        for stream in held:
            await stream.__aexit__(None, None, None)
        async with asyncio.timeout(60):
            short = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
            while (await client.post("/generate", json=short)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def test_native_streams(client: httpx.Client) -> None:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 6, "details": True, "ignore_eos": True}}
    events, last = events_of(client, "/generate_stream", body)
    assert last != "data: [DONE]"
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert all(list(event) == ["index", "token", "generated_text", "details"] for event in events)
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    assert list(events[-1]["details"]) == ["finish_reason", "generated_tokens", "seed", "input_length"]
    assert events[-1]["generated_text"] == ok(generate(client, max_new_tokens=6, ignore_eos=True))["generated_text"]
    refused(
        client.post("/generate_stream", json={"inputs": "x", "parameters": {"best_of": 2}}),
        422, "validation", "streaming",
    )  # fmt: skip


def test_the_root(client: httpx.Client) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 4}
    (answer,) = ok(client.post("/", json={"inputs": "Hello", "parameters": parameters}))
    text = ok(generate(client, max_new_tokens=4))["generated_text"]
    assert answer["generated_text"] == "Hello" + text
    (answer,) = ok(client.post("/", json={"inputs": "Hello", "parameters": parameters | {"return_full_text": False}}))
    assert answer["generated_text"] == text
    events, _ = events_of(client, "/", {"inputs": "Hello", "parameters": parameters, "stream": True})
    assert events[-1]["generated_text"] == "Hello" + text


def test_watermarks(client: httpx.Client) -> None:
    asked = {"max_new_tokens": 60, "ignore_eos": True, "details": True}
    plain, marked, again = (
        [token["id"] for token in ok(generate(client, **asked, watermark=value))["details"]["tokens"]]
        for value in (False, True, True)
    )
    assert marked == again != plain


def test_tokenize_counts_bytes(client: httpx.Client) -> None:
    text = "fox é 日本 🙂"
    raw = text.encode()
    spans = ok(client.post("/tokenize", json={"inputs": text}))
    assert all(list(span) == ["id", "text", "start", "stop"] for span in spans)
    assert spans[-1]["stop"] == len(raw)
    assert all(raw[span["start"] : span["stop"]].decode(errors="replace") == span["text"] for span in spans)


def test_the_key(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as anyone:
        for path in ("/health", "/ping", "/", "/info", "/metrics", "/v1/models", "/docs", "/api-doc/openapi.json"):
            assert anyone.get(path).status_code == 200, path
        for path in (
            "/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/invocations", "/vertex",
            "/tokenize", "/chat_tokenize", "/v2/models/m/versions/1/infer",
        ):  # fmt: skip
            refused(anyone.post(path, json={}), 401, "unauthorized")
            refused(anyone.post(path, json={}, headers={"authorization": f"Bearer {KEY.upper()}"}), 401, "unauthorized")
        headers = {
            "origin": "http://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        answer = anyone.options("/v1/chat/completions", headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()


def test_malformed_requests_are_answered_in_json(client: httpx.Client) -> None:
    def send(raw: Any, content_type: str = "application/json") -> httpx.Response:
        return client.post("/generate", content=raw, headers={"content-type": content_type})

    refused(send(b"{"), 400, "bad_request")
    refused(send(b'{"inputs": "x"}', "text/plain"), 415, "unsupported_media_type")
    refused(send(b'{"inputs": 1}'), 422, "validation", "inputs")
    refused(send(b'{"inputs": "x", "parameters": {"max_new_tokens": "20"}}'), 422, "validation", "max_new_tokens")
    refused(send(b" " * 100_001), 413, "payload_too_large")
    refused(send(iter([b" " * 60_000] * 2)), 413, "payload_too_large")
    refused(client.get("/generate"), 405, "method_not_allowed")
    refused(client.post("/nothing", json={}), 404, "not_found")
    refused(client.post("/v1/chat/completion", json={}), 404, "not_found", "/v1/chat/completions")
    answer = client.post("/generate", json={"inputs": ""}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"


def test_what_the_server_says_of_itself(client: httpx.Client) -> None:
    info = ok(client.get("/info"))
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (MAX_INPUT, MAX_TOTAL)
    assert info["max_concurrent_requests"] == MAX_CONCURRENT and info["version"] == "3.3.7"
    (card,) = ok(client.get("/v1/models"))["data"]
    assert card["max_model_len"] == MAX_TOTAL and card["created"] > 1_600_000_000
    assert ok(client.get(f"/v1/models/{card['id']}")) == card
    refused(client.get("/v1/models/other"), 404, "not_found")


def test_metrics(client: httpx.Client) -> None:
    def samples() -> dict[str, float]:
        text = client.get("/metrics").text
        assert "_total " not in text and "_created" not in text
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    before = samples()
    ok(generate(client, max_new_tokens=3, ignore_eos=True))
    ok(chat(client))
    refused(generate(client, temperature=0), 422, "validation")
    after = samples()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("tgi_request_count") == 3 and grown("tgi_request_success") == 2
    assert grown('tgi_request_failure{err="validation"}') == 1
    for name in ("duration", "queue_duration", "mean_time_per_token_duration", "generated_tokens", "input_length"):
        assert grown(f"tgi_request_{name}_count") == 2, name
    assert {'tgi_batch_inference_count{method="prefill"}', "tgi_queue_size", "tgi_batch_current_size"} <= after.keys()
    edges = [name for name in after if name.startswith("tgi_request_duration_bucket")]
    assert len(edges) == 36, "35 edges and infinity"
    lengths = [name for name in after if name.startswith("tgi_request_input_length_bucket")]
    assert len(lengths) == 101 and any(f'le="{MAX_INPUT}"' in name for name in lengths)


def test_each_generation_has_one_record(server: RunningServer, client: httpx.Client) -> None:
    for request_id, more in (("one-of-a-kind", {"n": 3, "stream": True}), ("the-one-behind-it", {})):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20} | more
        answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
        assert answer.status_code == 200
    log = server.log_with("the-one-behind-it")
    lines = [line for line in log.splitlines() if "one-of-a-kind" in line]
    assert len(lines) == 3
    for line in lines:
        assert " INFO chat_completions{parameters=" in line and ": Success request_id=one-of-a-kind " in line
