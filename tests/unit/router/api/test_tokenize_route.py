"""`/tokenize` and `/chat_tokenize`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from router_fakes import Router, is_invalid, message_of
from tokenizers import Tokenizer, models

from router.errors import OverloadedError
from router.text.tokenizer import LONG_CHARACTERS

MakeRouter = Callable[..., Router]


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
    assert is_invalid(answer)


async def test_long_answers_come_in_pieces(router: Router) -> None:
    """The loop is not held for all of it; the tokens are those of a short text."""
    one = "fox é 日本 🙂 "
    short = (await router.post("/tokenize", {"inputs": one * 10})).json()
    answer = await router.post("/tokenize", {"inputs": one * 300})
    assert "content-length" not in answer.headers and answer.headers["content-type"] == "application/json"
    spans = answer.json()
    assert len(spans) > 2000 and spans[: len(short) - 1] == short[:-1]  # all but the last blank
    raw = (one * 300).encode()
    assert all(span["text"] == raw[span["start"] : span["stop"]].decode() for span in spans)
    chat = {"messages": [{"role": "user", "content": one * 300}]}
    got = (await router.post("/chat_tokenize", chat)).json()
    raw = got["templated_text"].encode()
    assert len(got["tokenize_response"]) > 2000 and raw.decode().count(one) == 300
    assert "".join(span["text"] for span in got["tokenize_response"]).count("日本") == 300
    assert got["tokenize_response"][-1]["stop"] == len(raw)


async def test_too_much_text_at_once_is_overload(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise OverloadedError(7)

    monkeypatch.setattr(router.tokenizer._lanes.large, "run", full)
    for path in ("/tokenize", "/generate"):
        answer = await router.post(path, {"inputs": "dog " * LONG_CHARACTERS, "parameters": {"truncate": 5}})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    assert (await router.post("/tokenize", {"inputs": "dog " * 100})).status_code == 200
    router.assert_idle()


async def test_text_that_the_tokenizer_refuses(make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    wordwise = Tokenizer(models.WordLevel({"known": 0}, unk_token="<unk>"))  # which it does not have
    monkeypatch.setattr("router_fakes.Tokenizer.from_str", lambda source: wordwise)
    router = make_router()
    for path in ("/tokenize", "/generate"):
        answer = await router.post(path, {"inputs": "unheard of"})
        assert is_invalid(answer), answer.text
        assert message_of(answer).startswith("Input validation error: tokenizer error: ")


async def test_chat_tokenize(router: Router) -> None:
    text = "Zwölf 日本"
    asked = {"messages": [{"role": "user", "content": text}], "model": "tgi", "temperature": 0.5}
    answer = await router.post("/chat_tokenize", asked)
    assert answer.status_code == 200
    got = answer.json()
    rendered = f"<|user|>{text}\n<|assistant|>"
    assert list(got) == ["tokenize_response", "templated_text"] and got["templated_text"] == rendered
    spans, raw = got["tokenize_response"], rendered.encode()
    ids = await router.tokenizer.encode(rendered, add_special_tokens=False, truncate=None)
    assert [span["id"] for span in spans] == ids, "the template has brought the special tokens"
    assert all(span["text"] == raw[span["start"] : span["stop"]].decode() for span in spans)
    assert spans[-1]["stop"] == len(raw)
    assert "tgi_request_count 1" in (await router.get("/metrics")).text
    assert router.scheduler.submitted == []


async def test_chat_tokenize_refuses_what_chat_refuses(make_router: MakeRouter) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    answer = await make_router(templates={}).post("/chat_tokenize", chat)
    assert is_invalid(answer)
    assert answer.json() == {"error": "Template error: template not found", "error_type": "template_error"}
    assert (await make_router().post("/chat_tokenize", {"messages": []})).status_code == 422
