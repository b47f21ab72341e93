"""Gaps: `suffix` of `/v1/completions` and llama.cpp's `/infill`, with marks that no text can forge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from router_fakes import Router, says
from tokenizers import AddedToken, Tokenizer

from router.api.completions.infill import marks_of

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>", "<|repo_name|>", "<|file_sep|>"]
MISTRAL = ["[PREFIX]", "[SUFFIX]"]

MakeRouter = Callable[..., Router]


@pytest.fixture
def of_code(tokenizer: Tokenizer, renderer: Any) -> Iterator[MakeRouter]:
    made: list[Router] = []

    def make(marks: list[str], *arguments: Any) -> Router:
        coder = Tokenizer.from_str(tokenizer.to_str())
        coder.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        made.append(Router(coder, *arguments, renderer=renderer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def text_of(router: Router, ids: tuple[int, ...]) -> str:
    return str(router.tokenizer._on_loop.decode(list(ids), skip_special_tokens=False))


async def test_a_suffix_is_written_with_the_models_marks(of_code: MakeRouter) -> None:
    router = of_code(QWEN)
    asked = {"prompt": ["a <|fim_middle|>", "b"], "suffix": "c<s>", "stop_token_ids": [1], "max_tokens": 5}
    answer = await router.post("/v1/completions", asked)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
    first, second = router.scheduler.submitted
    assert text_of(router, first.input_ids) == "<s><|fim_prefix|>a <|fim_middle|><|fim_suffix|>c<s><|fim_middle|>"
    assert text_of(router, second.input_ids) == "<s><|fim_prefix|>b<|fim_suffix|>c<s><|fim_middle|>"
    middle = router.tokenizer.added_tokens["<|fim_middle|>"]
    assert [first.input_ids.count(id) for id in (middle, 0)] == [1, 1], "marks in texts are texts"
    assert first.stopping.stop_token_ids[0] == 1
    assert {router.tokenizer.added_tokens[mark] for mark in QWEN} <= set(first.stopping.stop_token_ids)
    router.assert_idle()


async def test_marks_whose_answer_follows_the_text_above(of_code: MakeRouter) -> None:
    router = of_code(MISTRAL)
    prompt = router.tokenizer._on_loop.encode("a", add_special_tokens=False).ids
    asked = {"prompt": prompt, "suffix": "b", "stream": True, "add_special_tokens": False}
    assert (await router.post("/v1/completions", asked)).text.endswith("data: [DONE]\n\n")
    assert text_of(router, router.scheduler.last.input_ids) == "[SUFFIX]b[PREFIX]a"


def test_the_marks_of_models() -> None:
    code_llama = {name: number for number, name in enumerate(("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"))}
    found = marks_of(code_llama)
    assert found is not None and (found.prefix, found.suffix, found.middle, found.ends) == (0, 1, 2, (0, 1, 2, 3))
    assert marks_of({"<|fim_prefix|>": 1, "<|fim_suffix|>": 2}) is None and marks_of({}) is None


async def test_echo_and_a_suffix_exclude_each_other(of_code: MakeRouter) -> None:
    answer = await of_code(QWEN).post("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True})
    assert answer.status_code == 400 and "`echo` and `suffix` exclude each other" in answer.text


async def test_infill_answers_as_llama_cpp(of_code: MakeRouter) -> None:
    router = of_code(QWEN, lambda _: says("x", "y;", reason="stop_sequence"))
    asked = {
        "input_prefix": "a", "input_suffix": "b", "prompt": "  c", "n_predict": 7, "stop": [";"], "cache_prompt": True,
        "input_extra": [{"filename": "f.py", "text": "d"}], "samplers": ["top_k", "infill"],
        "t_max_predict_ms": 500,
    }  # fmt: skip
    answer = await router.post("/infill", asked)
    request = router.scheduler.last
    assert answer.json() == {
        "content": "xy", "stop": True, "stop_type": "word", "truncated": False, "model": "some/model",
        "tokens_predicted": 2, "tokens_evaluated": request.input_length, "tokens_cached": 0,
    }  # fmt: skip
    assert text_of(router, request.input_ids) == (
        "<s><|repo_name|>repository\n<|file_sep|>f.py\nd\n<|file_sep|>file\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>  c"
    )
    assert request.stopping.max_new_tokens == 7
    stream = await router.post("/infill", asked | {"stream": True})
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line]
    assert "".join(event["content"] for event in events) == "xy"
    assert events[-1] == answer.json() | {"content": events[-1]["content"]}
    assert [event["stop"] for event in events] == [False, True]
    router.assert_idle()


async def test_extra_files_without_marks_for_them(of_code: MakeRouter) -> None:
    router = of_code(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    asked = {"input_prefix": "a", "input_suffix": "", "input_extra": [{"text": "d"}]}
    assert (await router.post("/infill", asked)).status_code == 200
    ids = router.scheduler.last.input_ids
    assert text_of(router, ids) == "<s>\n\n--- snippet ---\n\nd<fim_prefix>a<fim_suffix><fim_middle>"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "`input_suffix` is not supported by this model: its tokenizer has no marks for filling a gap"),
        ({"n": 2}, "`n` is not served here"),
        ({"echo": True}, "`echo` is not served here"),
        ({"suffix": "a"}, "`suffix` is not served here"),
        ({"prompt": ["a"]}, "expected a string"),
        ({"input_extra": [{}]}, "text"),
    ],
)
async def test_what_infill_refuses(router: Router, fields: dict[str, Any], says: str) -> None:
    answer = await router.post("/infill", {"input_prefix": "a"} | fields)
    assert answer.status_code in (400, 422) and says in answer.text
    router.assert_idle()
