"""Pictures in prompts and chats over HTTP, for families that are unlike LLaVA: the tokens of transformers' generate."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from parity.cross_scene import PROMPTS, SIZES, CrossScene
from parity.vision_scene import Prompt, VisionScene, picture
from support.pictures import picture as file
from support.running_server import running_server
from tokenizers import Tokenizer

from wire.images.families import FAMILIES

pytestmark = [pytest.mark.e2e, pytest.mark.parity]
NUM_TOKENS = 8
NAMES = [
    "aya_vision", "deepseek_vl", "gemma3", "gemma4", "gemma4_unified", "idefics3", "llama4", "llava_next_video",
    "llava_onevision", "paligemma", "qwen2_5_vl", "qwen3_5_moe", "qwen3_vl_moe", "vipllava",
]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
WITHOUT_SHARED_PREFIXES = ("paligemma", "vipllava")  # by its nature, and by the option
HALF = "\ufffd"


def url(number: int) -> str:
    written = io.BytesIO()
    picture(number).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def marked(numbers: tuple[int, ...], text: str) -> str:
    """A prompt of `parity.cross_scene` with markers."""
    shown = [base64.b64encode(file(*SIZES[number], number)).decode() for number in numbers]
    return text.format(*(f"![](data:image/png;base64,{one})" for one in shown))


def ask(base: str, route: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(base + route, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(base: str, chat: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of a chat, and its usage."""
    body = chat | {"stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), events[-1]["usage"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("gemma3", "qwen3_vl_moe") else pytest.mark.weekly) for name in NAMES],
)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in small steps, where the model lets them be cut, and a second time out of the caches; then a chat."""
    scene = VisionScene(tmp_path, name)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", FAMILIES[name].marker))
    environ = {"PREFIX_CACHING": "0"} if name == "vipllava" else {}
    options = ["--dtype", "float32", "--max-total-tokens", "2000", "--max-batch-prefill-tokens", "1900"]
    if name != "paligemma":
        options += ["--max-step-prefill-tokens", "32"]
    with running_server(tmp_path, *options, environ=environ) as server:
        base = f"http://127.0.0.1:{server.port}"
        for numbers in ((), (0,), (1, 0), (1, 0), (3,)):  # the arrays of the last one stay in shared memory for Qwen
            inputs = "".join(f"![]({url(number)})What is this? " for number in numbers) + "Hello world"
            ids = [token["id"] for token in ask(base, "/tokenize", {"inputs": inputs})]
            asked = {"inputs": inputs, "parameters": {"max_new_tokens": NUM_TOKENS, "details": True}}
            found = ask(base, "/generate", asked)["details"]
            expected = scene.generate(Prompt(ids, [], list(numbers)), NUM_TOKENS)
            assert [token["id"] for token in found["tokens"]] == expected, numbers

        content: list[dict[str, Any]] = [{"type": "text", "text": "Say what is here and there, and where it is: "}]
        for number in (1, 0):
            content += [{"type": "image_url", "image_url": {"url": url(number)}}, {"type": "text", "text": " and "}]
        chat = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0}
        ids = [token["id"] for token in ask(base, "/chat_tokenize", chat)["tokenize_response"]]
        tokens = scene.generate(Prompt(ids, [], [1, 0]), NUM_TOKENS)
        # The answer, or all of it, may end within a character.
        expected_text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(tokens).rstrip(HALF)
        whole = ask(base, "/v1/chat/completions", chat)
        again, usage = streamed(base, chat)
        assert whole["choices"][0]["message"]["content"].rstrip(HALF) == again.rstrip(HALF) == expected_text
        assert whole["usage"]["completion_tokens"] == usage["completion_tokens"] > 0
        assert whole["usage"]["prompt_tokens"] == usage["prompt_tokens"] == len(ids)
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == (name not in WITHOUT_SHARED_PREFIXES)

        assert "\ntgi_encoder_cache_misses 3\n" in httpx.get(f"{base}/metrics").text
        assert server.log().count("images are served: up to 8 in a request, in data URLs or fetched from public") == 1


@pytest.mark.parametrize("name", ["mllama", pytest.param("idefics", marks=pytest.mark.weekly)])
def test_layers_of_cross_attention_read_pictures(name: str, tmp_path: Path) -> None:
    """All prompts at once, texts among them; then a chat, streamed."""
    scene = CrossScene(tmp_path, name)
    with running_server(tmp_path, "--dtype", "float32") as server:
        base = f"http://127.0.0.1:{server.port}"

        def generated(one: tuple[tuple[int, ...], str]) -> list[int]:
            asked = {"inputs": marked(*one), "parameters": {"max_new_tokens": NUM_TOKENS, "details": True}}
            return [token["id"] for token in ask(base, "/generate", asked)["details"]["tokens"]]

        expected = []
        for one in PROMPTS:
            ids = [token["id"] for token in ask(base, "/tokenize", {"inputs": marked(*one)})]
            assert ids == scene.prompt(*one)[0]
            expected.append(scene.generate(*one, ids, NUM_TOKENS))
        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(generated, PROMPTS)) == expected

        content = [
            {"type": "text", "text": "what is "},
            {"type": "image_url", "image_url": {"url": marked((0,), "{}")[4:-1]}},
        ]
        chat = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0}
        whole = ask(base, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        assert streamed(base, chat)[0] == whole != ""
