"""Pictures over HTTP for families that are unlike LLaVA: the tokens of transformers' generate."""

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

pytestmark = [pytest.mark.e2e, pytest.mark.parity]
NUM_TOKENS = 8
NAMES = [
    "aya_vision", "deepseek_vl", "gemma3", "idefics3", "llama4", "llava_next_video", "llava_onevision", "paligemma",
    "qwen2_5_vl", "qwen3_vl_moe", "vipllava",
]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


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


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in small steps, where the model lets them be cut, and a second time out of the caches."""
    scene = VisionScene(tmp_path, name)
    options = ["--dtype", "float32", "--max-total-tokens", "2000", "--max-batch-prefill-tokens", "1900"]
    if name != "paligemma":
        options += ["--max-step-prefill-tokens", "32"]
    with running_server(tmp_path, *options) as server:
        base = f"http://127.0.0.1:{server.port}"
        for numbers in ((), (0,), (1, 0), (1, 0), (3,)):  # the arrays of the last one stay in shared memory for Qwen
            inputs = "".join(f"![]({url(number)})What is this? " for number in numbers) + "Hello world"
            ids = [token["id"] for token in ask(base, "/tokenize", {"inputs": inputs})]
            asked = {"inputs": inputs, "parameters": {"max_new_tokens": NUM_TOKENS, "details": True}}
            found = ask(base, "/generate", asked)["details"]
            expected = scene.generate(Prompt(ids, [], list(numbers)), NUM_TOKENS)
            assert [token["id"] for token in found["tokens"]] == expected, numbers
        text = httpx.get(f"{base}/metrics").text
        assert "\ntgi_encoder_cache_misses 3\n" in text


@pytest.mark.parametrize("name", ["mllama", "idefics"])
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
        answer = httpx.post(f"{base}/v1/chat/completions", json=chat | {"stream": True}, timeout=120)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole != ""
