"""Pictures over HTTP for families that are unlike LLaVA: the tokens of transformers' generate."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from parity.vision_scene import Prompt, VisionScene, picture
from support.running_server import running_server

pytestmark = [pytest.mark.e2e, pytest.mark.parity]
NUM_TOKENS = 8
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def url(number: int) -> str:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(base: str, route: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(base + route, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", ["gemma3", "idefics3", "llama4", "paligemma", "qwen2_5_vl"])
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in small steps, where the model lets them be cut, and a second time out of the caches."""
    scene = VisionScene(tmp_path, name)
    options = ["--dtype", "float32", "--max-total-tokens", "2000", "--max-batch-prefill-tokens", "1900"]
    if name != "paligemma":
        options += ["--max-step-prefill-tokens", "32"]
    with running_server(tmp_path, *options) as server:
        base = f"http://127.0.0.1:{server.port}"
        for numbers in ((), (0,), (1, 0), (1, 0)):
            inputs = "".join(f"![]({url(number)})What is this? " for number in numbers) + "Hello world"
            ids = [token["id"] for token in ask(base, "/tokenize", {"inputs": inputs})]
            asked = {"inputs": inputs, "parameters": {"max_new_tokens": NUM_TOKENS, "details": True}}
            found = ask(base, "/generate", asked)["details"]
            expected = scene.generate(Prompt(ids, [], list(numbers)), NUM_TOKENS)
            assert [token["id"] for token in found["tokens"]] == expected, numbers
        text = httpx.get(f"{base}/metrics").text
        assert "\ntgi_encoder_cache_misses 2\n" in text
