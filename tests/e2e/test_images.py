"""Pictures through the whole server: the tokens of transformers' generate, the cache, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from support.harmful_pictures import RARE
from support.pictures import picture
from support.running_server import RunningServer, running_server
from support.vision_models import write_vision_checkpoint
from tokenizers import Tokenizer
from transformers import AutoImageProcessor

pytestmark = pytest.mark.e2e
NUM_TOKENS = 8
PER_IMAGE = 16
BLOCK = 16
HALF = "\ufffd"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


class Scene:
    def __init__(self, server: RunningServer, folder: Path, model: Any) -> None:
        self.url = f"http://127.0.0.1:{server.port}"
        self._model = model.eval()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def expected(self, text: str, *pictures: bytes, add_special_tokens: bool = True) -> list[int]:
        """The tokens of transformers for a text with `<image>` for each picture."""
        written = text.replace("<image>", "<image>" * PER_IMAGE)
        ids = self._tokenizer.encode(written, add_special_tokens=add_special_tokens).ids
        pixels = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in pictures]
        read = self._processor(pixels, return_tensors="pt", input_data_format="channels_last") if pixels else {}
        with torch.no_grad():
            answer = self._model.generate(
                input_ids=torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, **read
            )
        return [int(token) for token in answer[0, len(ids) :]]

    def generate(self, inputs: str, **parameters: Any) -> list[int]:
        body = {"inputs": inputs, "parameters": {"max_new_tokens": NUM_TOKENS, "details": True, **parameters}}
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    def wait_idle(self) -> None:
        """Until nothing runs, waits or holds KV blocks."""
        held = ("tgi_batch_current_size", "tgi_queue_size", "tgi_kv_blocks_live")
        until = time.monotonic() + 60
        while any(self.metric(name) for name in held):
            assert time.monotonic() < until, {name: self.metric(name) for name in held}
            time.sleep(0.05)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(value)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("llava")
    model = write_vision_checkpoint(folder, "llava")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ("--dtype", "float32", "--max-total-tokens", "500", "--max-batch-prefill-tokens", "400")
    with running_server(folder, *options) as server:
        yield Scene(server, folder, model)


def test_the_tokens_of_generate(scene: Scene) -> None:
    first, second = picture(60, 80), picture(60, 80, 3)
    found = {}
    for name, text, pictures in (
        ("none", "What is this", ()),
        ("one", "What <image> is this", (first,)),
        ("another", "What <image> is this", (second,)),
        ("two", "<image> and <image> differ", (first, second)),
        ("swapped", "<image> and <image> differ", (second, first)),
    ):
        inputs = text
        for one in pictures:
            inputs = inputs.replace("<image>", f"![]({data_url(one)})", 1)
        found[name] = scene.generate(inputs)
        assert found[name] == scene.expected(text, *pictures), name
    assert found["one"] != found["another"] and found["two"] != found["swapped"]


def test_a_picture_that_was_seen_is_not_prepared_again(scene: Scene) -> None:
    inputs = f"Look: ![]({data_url(picture(50, 40, 7))}) well"
    first = scene.generate(inputs)
    prepared, read = scene.metric("tgi_image_prepare_duration_count"), scene.metric("tgi_image_count")
    assert scene.generate(inputs) == first
    assert scene.metric("tgi_image_prepare_duration_count") == prepared
    assert scene.metric("tgi_image_count") == read + 1


def test_prompts_share_what_is_before_in_and_behind_an_equal_picture_only(scene: Scene) -> None:
    """The tokens of transformers whatever is shared, which is whole blocks of 16 tokens."""
    seen, other = picture(66, 48, 21), picture(66, 48, 22)
    before = "What is this that is here and there, and what is it? "
    behind = " Say what this is and where it is. " * 3

    def ask(shown: bytes, end: str) -> tuple[int, int, list[float]]:
        """Prompt tokens, those of them that were shared, and counts of reading."""
        body = {
            "model": "m", "prompt": f"{before}![]({data_url(shown)}){behind}{end}", "max_tokens": NUM_TOKENS,
            "temperature": 0,
        }  # fmt: skip
        answer = httpx.post(f"{scene.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found, usage = answer.json()["choices"][0]["text"], answer.json()["usage"]
        expected = scene._tokenizer.decode(scene.expected(f"{before}<image>{behind}{end}", shown))
        assert found.rstrip(HALF) == expected.rstrip(HALF)  # the last token may end within a character
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], counts_of_reading(scene)

    start = len(scene._tokenizer.encode(before).ids)
    length, shared, first = ask(seen, "one")
    assert shared < BLOCK and start + PER_IMAGE + 2 * BLOCK < length
    _, shared, second = ask(seen, "two")  # behind the picture, which no shard is sent again
    assert shared > start + PER_IMAGE + BLOCK
    assert second == [first[0] + 1, *first[1:]]
    _, shared, third = ask(other, "two")
    assert start - BLOCK < shared <= start
    assert third == [count + 1 for count in second]


def test_a_streamed_chat(scene: Scene) -> None:
    seen = picture(70, 50, 5)
    content = [
        {"type": "text", "text": "What "},
        {"type": "image_url", "image_url": {"url": data_url(seen)}},
        {"type": "text", "text": " now"},
    ]
    body = {
        "messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True,
        "logprobs": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = httpx.post(f"{scene.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    expected = scene.expected("What <image> now", seen, add_special_tokens=False)
    assert text == scene._tokenizer.decode(expected)
    assert events[-1]["usage"]["prompt_tokens"] > PER_IMAGE


def counts_of_reading(scene: Scene) -> list[float]:
    """Images that were asked for, prepared, and encoded."""
    names = ("tgi_image_count", "tgi_image_prepare_duration_count", "tgi_encoder_cache_misses")
    return [scene.metric(name) for name in names]


def test_choices_of_a_prompt_read_and_encode_its_picture_once_and_hold_nothing(scene: Scene) -> None:
    def read_once(seed: int, route: str, make: Callable[[str], dict[str, Any]]) -> Any:
        before = counts_of_reading(scene)
        answer = httpx.post(f"{scene.url}{route}", json=make(data_url(picture(44, 66, seed))), timeout=120)
        assert answer.status_code == 200, answer.text
        assert counts_of_reading(scene) == [count + 1 for count in before]
        scene.wait_idle()
        return answer.json()

    asked = {"model": "m", "max_tokens": NUM_TOKENS, "temperature": 0}
    found = read_once(11, "/v1/completions", lambda url: asked | {"prompt": f"See ![]({url}) here", "n": 3})
    expected = scene._tokenizer.decode(scene.expected("See <image> here", picture(44, 66, 11)))
    assert [choice["text"] for choice in found["choices"]] == [expected] * 3

    def chat(url: str) -> dict[str, Any]:
        content = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url}}]
        return asked | {"messages": [{"role": "user", "content": content}], "n": 4}

    found = read_once(13, "/v1/chat/completions", chat)
    tokens = scene.expected("See <image>", picture(44, 66, 13), add_special_tokens=False)
    assert [choice["message"]["content"] for choice in found["choices"]] == [scene._tokenizer.decode(tokens)] * 4

    parameters = {"best_of": 2, "do_sample": True, "details": True, "max_new_tokens": NUM_TOKENS}
    found = read_once(14, "/generate", lambda url: {"inputs": f"See ![]({url}) here", "parameters": parameters})
    assert len(found["details"]["best_of_sequences"]) == 1


def test_clients_that_disconnect_leave_nothing_of_their_picture(scene: Scene) -> None:
    """While it is read, and while tokens are streamed."""
    seen = picture(80, 44, 12)
    body = {
        "inputs": f"See ![]({data_url(seen)}) here",
        "parameters": {"max_new_tokens": 400, "ignore_eos": True},
    }
    raw = json.dumps(body).encode()
    head = (
        f"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    ).encode()
    for waits in (False, True):
        with socket.create_connection(("127.0.0.1", int(scene.url.rsplit(":", 1)[1])), timeout=60) as client:
            client.sendall(head + raw)
            if waits:
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
    scene.wait_idle()
    assert scene.generate("What is this") == scene.expected("What is this")


def test_harmful_files_cost_their_own_requests_only(scene: Scene) -> None:
    expected = scene.expected("What is this")
    for data in (b"", b"<svg/>", picture(64, 64)[:90], b"%!PS", bytes(1000)):
        answer = httpx.post(f"{scene.url}/generate", json={"inputs": f"![]({data_url(data)})"}, timeout=60)
        assert answer.status_code == 422 and answer.json()["error_type"] == "validation"
        assert "invalid image" in answer.json()["error"]
    assert scene.generate("What is this") == expected


@pytest.mark.long
def test_pictures_of_49_megapixels_are_read_up_to_the_limit_of_a_request(scene: Scene) -> None:
    """Small files: two are as many pixels as a request may have. What is refused holds nothing."""
    shown = f"![]({data_url(RARE['49 megapixels']())})"
    expected = scene.expected("What is this")

    def ask(number: int) -> httpx.Response:
        return httpx.post(f"{scene.url}/generate", json={"inputs": f"{shown} " * number + "here"}, timeout=120)

    for number in (8, 2, 8):  # not in the cache of pictures, and in it
        answer = ask(number)
        assert answer.status_code == (200 if number == 2 else 422), answer.text
        if number == 8:
            said = "Input validation error: invalid image: the images of a request may have 100000000 pixels in all"
            assert answer.json() == {"error": said, "error_type": "validation"}
        scene.wait_idle()
    assert scene.generate("What is this") == expected
