"""What the routes say and repeat of prompts with images, and what is refused before a file is fetched."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from image_scene import ITERATES, PER_IMAGE, Scene
from support.pictures import picture

from router.api.http import body
from router.images.prompt import AskedPrompt

MakeScene = Callable[..., Scene]
URL = "http://x/y.png"
PROMPT = f"The ![]({URL}) fox"


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    return make_scene(templates={"default": ITERATES}, files={URL: picture(40, 50)})


async def test_images_count_in_count_tokens(scene: Scene) -> None:
    source = {"type": "url", "url": URL}
    content = [{"type": "text", "text": "What is "}, {"type": "image", "source": source}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    counted = (await scene.post("/v1/messages/count_tokens", **body)).json()["input_tokens"]
    used = (await scene.post("/v1/messages", max_tokens=5, **body)).json()["usage"]["input_tokens"]
    assert counted == used == scene.last.input_length > PER_IMAGE


async def test_answers_repeat_the_text_that_the_client_sent(scene: Scene) -> None:
    native = await scene.post("/", inputs=PROMPT)
    assert native.json()[0]["generated_text"] == PROMPT + " one two"
    assert native.headers["x-compute-characters"] == str(len(PROMPT))
    full = await scene.post("/generate", inputs=PROMPT, parameters={"return_full_text": True})
    assert full.json()["generated_text"] == PROMPT + " one two"
    stream = await scene.post("/", inputs=PROMPT, stream=True)
    assert json.loads(stream.text.strip().splitlines()[-1][5:])["generated_text"] == PROMPT + " one two"
    assert stream.headers["x-compute-characters"] == str(len(PROMPT))

    completion = {"model": "m", "prompt": ["before", PROMPT], "echo": True, "n": 2, "max_tokens": 5}
    choices = (await scene.post("/v1/completions", **completion)).json()["choices"]
    echoed = ["before one two"] * 2 + [PROMPT + " one two"] * 2
    assert [choice["text"] for choice in choices] == echoed
    lines = (await scene.post("/v1/completions", **completion, stream=True)).text.splitlines()
    texts = [""] * 4
    for line in lines:
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == echoed


async def test_offsets_of_tokens_are_in_the_text_that_is_answered(scene: Scene) -> None:
    content = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": URL}}]
    answer = (await scene.post("/chat_tokenize", messages=[{"role": "user", "content": content}])).json()
    text = answer["templated_text"]
    assert text == "What is " + "<image>" * PER_IMAGE
    spans = answer["tokenize_response"]
    assert "".join(span["text"] for span in spans) == text
    assert all(text.encode()[span["start"] : span["stop"]].decode() == span["text"] for span in spans)


async def test_an_answer_of_no_given_length_gets_the_room_that_images_leave(scene: Scene) -> None:
    scene.router.scheduler.most_new_tokens = lambda input_length, num_images=0: 90 - 40 * num_images
    answer = await scene.post("/v1/completions", model="m", prompt=PROMPT)
    assert answer.status_code == 200 and scene.last.stopping.max_new_tokens == 50
    status, error = await scene.refusal("/v1/completions", model="m", prompt=PROMPT, max_tokens=51)
    assert status == 400 and "51 `max_tokens` besides its images do not fit the server's cache" in error
    status, _ = await scene.refusal("/v1/completions", model="m", prompt=PROMPT * 3)
    assert status == 400


@pytest.mark.parametrize("seed", [None, 7])
async def test_choices_share_the_files_of_their_prompt(seed: int | None, scene: Scene) -> None:
    await scene.post("/v1/completions", model="m", prompt=PROMPT, n=3, seed=seed)
    assert len(scene.images.files.fetched) == 1 and len({one.sampling.seed for one in scene.submitted[-3:]}) == 3
    instance = {"inputs": PROMPT, "parameters": {"best_of": 2, "do_sample": True}}
    answer = await scene.post("/vertex", instances=[instance])
    assert answer.status_code == 200 and len(scene.images.files.fetched) == 2
    await scene.post("/generate", **instance)
    assert len(scene.images.files.fetched) == 3 and len(scene.images.workers.prepared) == 1


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"adapter_id": "none"}, "none"),
        ({"grammar": {"type": "regex", "value": "("}}, "rammar"),
        ({"decoder_input_details": True, "details": True}, "prompts with images"),
        ({"temperature": -1.0}, "`temperature`"),
        ({"truncate": 10**6}, "`truncate`"),
    ],
)
async def test_parameters_are_refused_before_a_file_is_fetched(
    parameters: dict[str, Any], words: str, scene: Scene
) -> None:
    status, error = await scene.refusal("/generate", inputs=PROMPT, parameters=parameters)
    assert status == 422 and words in error and scene.images.files.fetched == []


async def test_texts_that_are_too_long_are_refused_before_a_file_is_fetched(scene: Scene) -> None:
    status, error = await scene.refusal("/generate", inputs=PROMPT + "x" * 100_000)
    assert status == 422 and "`inputs`" in error and scene.images.files.fetched == []


async def test_counting_tokens_of_images_takes_a_permit(scene: Scene) -> None:
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
    with scene.router.inference.take_permits(4):
        for path, body in (("/tokenize", {"inputs": PROMPT}), ("/chat_tokenize", {"messages": chat})):
            assert (await scene.post(path, **body)).status_code == 429
        assert (await scene.post("/tokenize", inputs="no image")).status_code == 200
    assert scene.images.files.fetched == []
    assert (await scene.post("/tokenize", inputs=PROMPT)).status_code == 200
    scene.router.assert_idle()


@pytest.mark.parametrize("is_large", [False, True])
async def test_images_of_a_large_prompt_are_looked_for_beside_the_event_loop(
    is_large: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    of_text = scene.images.prompts.of_text

    def noted(text: str, field: str) -> AskedPrompt:
        threads.append(threading.current_thread())
        return of_text(text, field)

    monkeypatch.setattr(scene.images.prompts, "of_text", noted)
    file = "A" * (1 << 17 if is_large else 4)
    status, fault = await scene.refusal("/generate", inputs=f"![](data:image/png;base64,{file})")
    assert status == 422 and fault.startswith("Input validation error: invalid image: ")
    assert [one is threading.main_thread() for one in threads] == [not is_large]


async def test_a_body_that_is_joined_beside_the_event_loop_is_whole(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "_JOINED_IN_A_THREAD", 1)
    answer = await scene.post("/generate", inputs=PROMPT)
    assert answer.status_code == 200 and len(scene.last.images) == 1
