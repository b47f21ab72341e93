"""The HTTP interface as its users count on it, check by check, through a whole server with small limits.

Unit tests hold every row of the tables; here stands what only the real parts together can show.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from support.answers import events_of, ok, refused
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

KEY = "open sesame"
MAX_INPUT, MAX_TOTAL = 1900, 2000
MAX_CONCURRENT = 4
RARE = "\x01"  # one token each: no text of the tokenizer's training has it
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[RunningServer]:
    with running_server(
        llama, "--dtype", "float32", "--max-total-tokens", str(MAX_TOTAL), "--max-input-tokens", str(MAX_INPUT),
        "--max-batch-prefill-tokens", str(MAX_TOTAL), "--max-batch-total-tokens", str(5 * MAX_TOTAL),
        "--max-concurrent-requests", str(MAX_CONCURRENT), "--enable-prefill-logprobs", "--payload-limit", "100000",
        "--api-key", KEY, environ={"KSERVE_API": "true"},
    ) as started:  # fmt: skip
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as opened:
        yield opened


def generate(client: httpx.Client, inputs: str = "Hello", **parameters: Any) -> httpx.Response:
    return client.post("/generate", json={"inputs": inputs, "parameters": parameters})


def chat(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    asked = list(messages) or [{"role": "user", "content": "Hello"}]
    return client.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 5} | fields)


def text_of(client: httpx.Client, num_tokens: int) -> str:
    """A prompt of exactly this many tokens."""
    added = len(ok(client.post("/tokenize", json={"inputs": RARE}))) - 1
    text = RARE * (num_tokens - added)
    assert len(ok(client.post("/tokenize", json={"inputs": text}))) == num_tokens
    return text


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


def test_openai_streams(client: httpx.Client) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4, "ignore_eos": True}
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/invocations", {"messages": messages}),
    ):
        events, last = events_of(client, path, body | usage)
        assert last == "data: [DONE]"
        assert len(events) == 5 and len({(event["id"], event["created"]) for event in events}) == 1
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "length"]
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4
        assert all(event["usage"] is None for event in events[:-1])
        assert {event["system_fingerprint"] for event in events} == {"3.3.7-native"}


def test_the_root(client: httpx.Client) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 4}
    (answer,) = ok(client.post("/", json={"inputs": "Hello", "parameters": parameters}))
    text = ok(generate(client, max_new_tokens=4))["generated_text"]
    assert answer["generated_text"] == "Hello" + text
    (answer,) = ok(client.post("/", json={"inputs": "Hello", "parameters": parameters | {"return_full_text": False}}))
    assert answer["generated_text"] == text
    events, _ = events_of(client, "/", {"inputs": "Hello", "parameters": parameters, "stream": True})
    assert events[-1]["generated_text"] == "Hello" + text


def test_completions(client: httpx.Client) -> None:
    prompts = ["The quick", "Hello", "What is"]
    asked = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    whole = ok(client.post("/v1/completions", json={"prompt": prompts} | asked))
    assert re.fullmatch("cmpl-[0-9a-f]{32}", whole["id"])
    alone = [ok(client.post("/v1/completions", json={"prompt": prompt} | asked)) for prompt in prompts]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in whole["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert whole["usage"] == {name: sum(one["usage"][name] for one in alone) for name in whole["usage"]}
    five = client.post("/v1/completions", json={"prompt": ["x"] * 5})
    refused(five, 422, "batch size exceeded", "Given: 5")
    refused(client.post("/v1/completions", json={"prompt": "x", "suffix": "y"}), 422, "suffix not supported")


def test_a_prompt_of_the_tokens_of_a_text(client: httpx.Client) -> None:
    asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    ids = [span["id"] for span in ok(client.post("/tokenize", json={"inputs": "The quick brown"}))]
    by_ids = ok(client.post("/v1/completions", json={"prompt": ids} | asked))
    by_text = ok(client.post("/v1/completions", json={"prompt": "The quick brown"} | asked))
    assert by_ids["choices"] == by_text["choices"] and by_ids["usage"] == by_text["usage"]
    refused(client.post("/v1/completions", json={"prompt": [ids[0], 10**6]} | asked), 422, "validation", "1000000")


def test_a_prompt_of_tokens_that_no_text_has(client: httpx.Client) -> None:
    def ids_of(text: str) -> list[int]:
        return [span["id"] for span in ok(client.post("/tokenize", json={"inputs": text}))]

    whole = ids_of("The quick")
    ids = [whole[0], *(ids_of(letter)[-1] for letter in "The quick")]
    assert len(ids) > len(whole)
    asked = {"prompt": ids, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 0, "ignore_eos": True}
    answer = ok(client.post("/v1/completions", json=asked))
    (choice,) = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert choice["text"].startswith("<s>The quick")
    assert choice["logprobs"]["tokens"][: len(ids)] == ["<s>", *"The quick"], "just these, and not those of their text"
    assert choice["logprobs"]["text_offset"][: len(ids)] == [0, *range(3, 12)]
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_stops(client: httpx.Client) -> None:
    asked = {"prompt": "The quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = ok(client.post("/v1/completions", json=asked))["choices"][0]["text"]
    stop = text[6:8]
    before = text[: text.index(stop)]
    choice = ok(client.post("/v1/completions", json=asked | {"stop": stop}))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    events, _ = events_of(client, "/v1/completions", asked | {"stop": stop, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == before
    parameters = {"max_new_tokens": 12, "ignore_eos": True, "stop": [stop], "details": True}
    answer = ok(generate(client, "The quick", **parameters))
    assert answer["generated_text"] == before + stop and answer["details"]["finish_reason"] == "stop_sequence"
    # The same stop, completed by the last token that is allowed.
    number = answer["details"]["generated_tokens"]
    answer = ok(generate(client, "The quick", **parameters | {"max_new_tokens": number}))
    assert answer["generated_text"] == before + stop and answer["details"]["finish_reason"] == "length"
    choice = ok(client.post("/v1/completions", json=asked | {"stop": stop, "max_tokens": number}))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "length")
    events, _ = events_of(client, "/v1/completions", asked | {"stop": stop, "max_tokens": number, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == before


def test_watermarks(client: httpx.Client) -> None:
    asked = {"max_new_tokens": 60, "ignore_eos": True, "details": True}
    plain, marked, again = (
        [token["id"] for token in ok(generate(client, **asked, watermark=value))["details"]["tokens"]]
        for value in (False, True, True)
    )
    assert marked == again != plain


def test_chat(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    whole, flat = (ok(chat(client, {"role": "user", "content": c}, temperature=0)) for c in ("Hello", parts))
    assert whole["choices"] == flat["choices"] and whole["usage"] == flat["usage"]
    assert list(whole["choices"][0]) == ["index", "message", "logprobs", "finish_reason"]
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", whole["id"])

    def templated(*messages: dict[str, Any]) -> str:
        return str(ok(client.post("/chat_tokenize", json={"messages": list(messages)}))["templated_text"])

    user = {"role": "user", "content": "Hello"}
    developer, system = ({"role": role, "content": "Be brief"} for role in ("developer", "system"))
    assert templated(developer, user) == templated(system, user)
    continued = templated(user, {"role": "assistant", "content": "I am"})
    assert continued.endswith("I am") and templated(user).endswith("<|assistant|>")
    ok(chat(client, developer, user))
    refused(chat(client, {"role": "user", "content": [{"type": "audio"}]}), 422, "validation", "messages")


@pytest.mark.parametrize(
    "form",
    [{"type": "json", "value": SCHEMA}, {"type": "json_object", "value": SCHEMA},
     {"type": "json_object", "schema": SCHEMA},
     {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
     {"type": "json_schema", "value": {"schema": SCHEMA}}, {"type": "regex", "value": r'\{"ok": ?(true|false)\}'},
     {"type": "json", "value": json.dumps(SCHEMA)}],
)  # fmt: skip
def test_response_formats(client: httpx.Client, form: dict[str, Any]) -> None:
    choice = ok(chat(client, response_format=form, max_tokens=60, temperature=2.0, seed=4))["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_other_response_formats(client: httpx.Client) -> None:
    answer = ok(chat(client, response_format={"type": "json_object"}, max_tokens=400, seed=4))["choices"][0]
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)
    ok(chat(client, response_format={"type": "text"}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    error = refused(chat(client, response_format={"type": "json_object"}, tools=[tool]), 422, "tool_error")
    assert error == "Tool error: Grammar and tools are mutually exclusive"


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
    refused(client.post("/v1/responses", json={}), 404, "not_found", "/v1/chat/completions")
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
