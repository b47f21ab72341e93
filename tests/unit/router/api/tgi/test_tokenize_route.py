"""Routes between texts and tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from router_fakes import Router, is_invalid, message_of
from tokenizers import Tokenizer, models

from router.errors import OverloadedError
from router.template.template import NO_TEMPLATE
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
    assert answer.json() == {"error": f"Template error: {NO_TEMPLATE}", "error_type": "template_error"}
    assert (await make_router().post("/chat_tokenize", {"messages": []})).status_code == 422


async def test_vllms_body_of_a_text(router: Router) -> None:
    text = "fox é 日本"
    ids = await router.tokenizer.encode(text, add_special_tokens=True, truncate=None)
    answer = (await router.post("/tokenize", {"model": "tgi", "prompt": text})).json()
    assert answer == {"count": len(ids), "max_model_len": 2048, "tokens": ids}
    bare = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    answer = (await router.post("/tokenize", bare)).json()
    assert answer["tokens"] == ids[1:] and answer["count"] == len(answer["token_strs"]) == len(ids) - 1
    assert answer["token_strs"] == [router.tokenizer.name_of(one) for one in ids[1:]]
    assert (await router.post("/tokenize", {"prompt": ""})).json()["tokens"] == ids[:1]
    assert is_invalid(await router.post("/tokenize", {"prompt": ["a"]}))


async def test_vllms_body_of_a_chat(router: Router) -> None:
    chat = {"messages": [{"role": "user", "content": "Zwölf"}]}
    ids = await router.tokenizer.encode("<|user|>Zwölf\n<|assistant|>", add_special_tokens=False, truncate=None)
    assert (await router.post("/tokenize", chat)).json()["tokens"] == ids
    with_bos = (await router.post("/tokenize", chat | {"add_special_tokens": True, "return_token_strs": True})).json()
    assert with_bos["tokens"][1:] == ids and with_bos["count"] == len(with_bos["token_strs"]) == len(ids) + 1
    open_ended = (await router.post("/tokenize", chat | {"add_generation_prompt": False})).json()
    assert 0 < open_ended["count"] < len(ids)
    refused = await router.post("/tokenize", chat | {"chat_template": "x"})
    assert is_invalid(refused) and "`chat_template` is not served here" in message_of(refused)


async def test_llama_cpps_body(router: Router) -> None:
    text = "fox é 日"
    ids = await router.tokenizer.encode(text, add_special_tokens=False, truncate=None)
    assert (await router.post("/tokenize", {"content": text})).json() == {"tokens": ids}
    assert (await router.post("/tokenize", {"content": ""})).json() == {"tokens": []}
    begun = (await router.post("/tokenize", {"content": text, "add_special": True})).json()["tokens"]
    assert begun[1:] == ids
    router.tokenizer.token_bytes.clear()  # the fake's, which have none
    pieces = (await router.post("/tokenize", {"content": text, "with_pieces": True})).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    raw = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces
    )
    assert raw.decode() == text and any(isinstance(piece["piece"], list) for piece in pieces)


async def test_special_tokens_of_a_text_are_text_without_parse_special(router: Router) -> None:
    special = sorted(router.tokenizer.special_tokens)[0]
    token = router.tokenizer.added_tokens[special]
    parsed = (await router.post("/tokenize", {"content": special})).json()["tokens"]
    assert parsed == [token]
    plain = (await router.post("/tokenize", {"content": special, "parse_special": False})).json()["tokens"]
    assert token not in plain and await router.tokenizer.text_of(plain) == special
    for content in (special, special + " x" * LONG_CHARACTERS):  # the worker's tokenizer is as before
        assert (await router.post("/tokenize", {"content": content})).json()["tokens"][0] == token


async def test_long_lists_of_ids_come_in_pieces(router: Router) -> None:
    text = "fox é 日本 " * 300
    ids = await router.tokenizer.encode(text, add_special_tokens=False, truncate=None)
    answer = await router.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True})
    assert "content-length" not in answer.headers
    assert list(answer.json()) == ["count", "max_model_len", "tokens", "token_strs"]
    assert answer.json()["tokens"] == ids and len(answer.json()["token_strs"]) == len(ids) > 2000
    assert (await router.post("/tokenize", {"content": text})).json() == {"tokens": ids}


async def test_detokenize(router: Router) -> None:
    text = "fox é 日本 🙂"
    ids = await router.tokenizer.encode(text, add_special_tokens=True, truncate=None)
    answer = (await router.post("/detokenize", {"tokens": ids})).json()
    assert answer["prompt"] == answer["content"] == await router.tokenizer.text_of(ids)
    assert answer["content"].endswith(text) and answer["content"] != text, "special tokens are part of it"
    assert (await router.post("/detokenize", {"tokens": []})).json() == {"prompt": "", "content": ""}
    for tokens in ([10**6], [-1], ["1"], "x", None):
        assert is_invalid(await router.post("/detokenize", {"tokens": tokens})), tokens
    assert "tgi_request_count 0" in (await router.get("/metrics")).text


async def test_apply_template(router: Router) -> None:
    chat = {"messages": [{"role": "user", "content": "Zwölf"}]}
    assert (await router.post("/apply-template", chat)).json() == {"prompt": "<|user|>Zwölf\n<|assistant|>"}
    assert is_invalid(await router.post("/apply-template", {"messages": []}))
    assert router.scheduler.submitted == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "expected an object with one of `inputs`, `prompt`, `messages`, `content`"),
        ({"input": "x"}, "did you mean `inputs`?"),
        ({"mesages": []}, "did you mean `messages`?"),
        ({"content": "x", "with_peices": True}, "did you mean `with_pieces`?"),
        ({"prompt": "x", "return_token_str": True}, "did you mean `return_token_strs`?"),
        ([], "expected an object"),
    ],
)
async def test_bodies_that_are_none(router: Router, body: object, text: str) -> None:
    answer = await router.post("/tokenize", body)
    assert is_invalid(answer) and text in message_of(answer)
