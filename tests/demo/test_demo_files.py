"""Corpus, tokenizer and chat template: reproducible, without the held-out prompts, rendered alike everywhere."""

from __future__ import annotations

import json
import re
from typing import Any

import jinja2
import pytest
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from demo_model import corpus, tokenizer
from wire import demo_model as package

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = json.dumps(WEATHER["function"])


@pytest.fixture(scope="module")
def loaded() -> Any:
    return transformers.AutoTokenizer.from_pretrained(package.path())


def _call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "0", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}],
    }


CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]] = [
    ([{"role": "user", "content": "Hi"}], None, "<|bos|><|user|>Hi<|end|><|assistant|>"),
    (
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " a\n"}],
        None,
        "<|bos|><|system|>Be kind.<|end|><|user|> a\n<|end|><|assistant|>",
    ),
    (
        [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        [WEATHER],
        f"<|bos|><|system|>Be kind.\nTools:\n{SCHEMA}<|end|><|user|>Hi<|end|><|assistant|>",
    ),
    (
        [{"role": "user", "content": "Hi"}],
        [WEATHER, WEATHER],
        f"<|bos|><|system|>Tools:\n{SCHEMA}\n{SCHEMA}<|end|><|user|>Hi<|end|><|assistant|>",
    ),
    (
        [{"role": "user", "content": "W?"}, _call({"city": "Zürich", "n": 3}), {"role": "tool", "content": "21"}],
        None,
        '<|bos|><|user|>W?<|end|><|assistant|>{"function": {"_name": "get_weather", "city": "Zürich", "n": 3}}<|end|>'
        "<|tool|>21<|end|><|assistant|>",
    ),
    (
        [{"role": "user", "content": "W?"}, _call('{"city": "Rome"}'), {"role": "tool", "content": "21"}],
        None,
        '<|bos|><|user|>W?<|end|><|assistant|>{"function": {"_name": "get_weather", "city": "Rome"}}<|end|>'
        "<|tool|>21<|end|><|assistant|>",
    ),
    (
        [{"role": "user", "content": "W?"}, _call({}), _call("{}"), _call(None)],
        None,
        "<|bos|><|user|>W?<|end|>" + '<|assistant|>{"function": {"_name": "get_weather"}}<|end|>' * 3 + "<|assistant|>",
    ),
]


@pytest.mark.parametrize(("messages", "tools", "expected"), CHATS)
def test_template(
    loaded: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, expected: str
) -> None:
    text = loaded.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert text == expected


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(("messages", "tools", "expected"), CHATS)
def test_template_in_other_renderers(
    trim: bool, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, expected: str
) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim, undefined=jinja2.Undefined)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(tokenizer.config()["chat_template"])
    variables = {"messages": messages, "bos_token": tokenizer.BOS, "eos_token": tokenizer.END}
    if tools is not None:
        variables["tools"] = tools
    assert template.render(**variables, add_generation_prompt=True) == expected
    assert template.render(**variables) == expected.removesuffix("<|assistant|>")


def test_first_token_comes_once(loaded: Any) -> None:
    bos = loaded.bos_token_id
    assert loaded("Hello")["input_ids"][0] == bos
    assert bos not in loaded("Hello", add_special_tokens=False)["input_ids"]
    text = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert loaded(text, add_special_tokens=False)["input_ids"].count(bos) == 1


@pytest.mark.parametrize("text", ["a 12345 b", " 2+3=5", "Zürich 😀 こんにちは\n\t x  y", '{"a": ["b", 10]}'])
def test_text_survives(loaded: Any, text: str) -> None:
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert loaded.decode(ids) == text
    assert all(len(re.findall(r"\d", loaded.decode([token]))) <= 1 for token in ids)


def test_corpus_is_reproducible() -> None:
    assert corpus.lines(0) == corpus.CORPUS.read_text(encoding="utf-8")
    assert corpus.CORPUS.stat().st_size < 6_000_000


def test_tokenizer_is_reproducible() -> None:
    built = tokenizer.build()
    assert built.get_vocab_size() == tokenizer.VOCABULARY
    assert built.to_str(pretty=True) + "\n" == (package.path() / "tokenizer.json").read_text(encoding="utf-8")
    shipped = json.loads((package.path() / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert shipped == tokenizer.config()


def _written(a: int, sign: str, b: int) -> str:
    """A pattern for a sum in every wording of the corpus, in both orders."""
    forms = {"+": ("{} ?(\\+|plus) ?{}", "(add|sum of) {} and {}"), "-": ("{} ?(-|minus) ?{}", "{} from {}")}[sign]
    return "|".join(rf"\b{form.format(x, y)}\b" for form in forms for x, y in ((a, b), (b, a)))


@pytest.mark.parametrize("seed", [0, *corpus.STAGES])
def test_held_out_prompts_are_not_in_the_corpus(seed: int) -> None:
    groups = json.loads(corpus.PROMPTS.read_text(encoding="utf-8"))
    entries = groups["held_out"] + groups["larger_sums"]
    held = [entry["prompt"].lower() for entry in entries]
    pattern = re.compile("|".join(_written(*e["sum"]) for e in entries if "sum" in e))
    for line in corpus.lines(seed).splitlines():
        document = json.loads(line)
        texts = [document["text"]] if "text" in document else [m.get("content", "") for m in document["messages"]]
        for text in texts:
            assert not any(prompt in text.lower() for prompt in held), text
            assert not pattern.search(text.lower()), text
