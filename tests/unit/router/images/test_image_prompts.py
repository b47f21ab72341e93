"""Prompts with images, through the router's routes: what the scheduler is given, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from image_scene import ITERATES, PER_IMAGE, Scene, data_url
from router_fakes import Router, is_invalid
from support.metrics_text import metrics_of
from support.pictures import picture

from wire.images.prepared import Feature, PreparedImage

MakeScene = Callable[..., Scene]


async def test_a_marker_becomes_the_tokens_of_its_image(make_scene: MakeScene) -> None:
    scene = make_scene()
    answer = await scene.post("/generate", inputs=f"The ![]({data_url(40, 50)}) fox")
    assert answer.status_code == 200, answer.text
    request = scene.last
    (one,) = request.images
    assert one.image.num_embeds == one.place.length == PER_IMAGE
    assert request.input_ids[one.place.start : one.place.stop] == (scene.token_id,) * PER_IMAGE
    assert scene.token_id not in request.input_ids[: one.place.start] + request.input_ids[one.place.stop :]
    assert request.input_length == len(request.input_ids)
    assert request.inputs == "The " + "<image>" * PER_IMAGE + " fox"


async def test_equal_images_are_prepared_once_and_keep_their_order(make_scene: MakeScene) -> None:
    scene = make_scene()
    first, second = data_url(40, 50), data_url(40, 50, 1)
    for _ in range(2):
        await scene.post("/generate", inputs=f"![]({first})![]({second})a![]({first})")
        assert [one.image.key for one in scene.last.images][0::2] == [scene.last.images[0].image.key] * 2
        assert scene.last.images[0].image.key != scene.last.images[1].image.key
        stops = [one.place.stop for one in scene.last.images]
        starts = [one.place.start for one in scene.last.images]
        assert starts[0] == 1 and starts[1] == stops[0] and starts[2] > stops[1]
    assert len(scene.images.workers.prepared) == 2


@pytest.mark.parametrize("templates", [None, {"default": ITERATES}])
async def test_the_images_of_a_chat_stand_where_the_template_shows_them(
    templates: dict[str, str] | None, make_scene: MakeScene
) -> None:
    scene = make_scene(templates=templates, files={"http://x/y.png": picture(30, 30)})
    content = [
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": data_url(40, 50)}},
        {"type": "text", "text": " beside "},
        {"type": "image_url", "image_url": {"url": "http://x/y.png", "detail": "low"}},
    ]
    answer = await scene.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], n=2)
    assert answer.status_code == 200, answer.text
    image = "<image>" * PER_IMAGE
    assert f"What is {image} beside {image}" in scene.last.inputs
    assert [job.detail for job in scene.images.workers.prepared] == ["auto", "low"]
    assert scene.images.files.fetched == ["http://x/y.png"]  # once for all choices
    assert answer.json()["usage"]["prompt_tokens"] == scene.last.input_length > 2 * PER_IMAGE


async def test_markers_in_a_chat_count_where_the_template_gets_text(make_scene: MakeScene) -> None:
    text = f"What is ![]({data_url(40, 50)})?"
    scene = make_scene()
    await scene.post("/v1/chat/completions", messages=[{"role": "user", "content": text}])
    assert len(scene.last.images) == 1
    scene = make_scene(templates={"default": ITERATES})
    await scene.post("/v1/chat/completions", messages=[{"role": "user", "content": "![](http://x/y.png)"}])
    assert scene.last.images == () and scene.last.inputs == "![](http://x/y.png)"


async def test_the_other_routes(make_scene: MakeScene) -> None:
    scene = make_scene()
    prompt = f"a ![]({data_url(40, 50)})"
    await scene.post("/v1/completions", model="m", prompt=prompt, n=2, best_of=2)
    assert len(scene.last.images) == 1
    tokens = (await scene.post("/tokenize", inputs=prompt)).json()
    assert sum(token["id"] == scene.token_id for token in tokens) == PER_IMAGE
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(40, 50)).decode()}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    answer = await scene.post("/v1/messages", model="m", max_tokens=5, messages=[message])
    assert answer.status_code == 200 and len(scene.last.images) == 1
    part = {"type": "input_image", "image_url": data_url(40, 50)}
    answer = await scene.post("/v1/responses", model="m", input=[{"role": "user", "content": [part]}])
    assert answer.status_code == 200 and len(scene.last.images) == 1
    assert len(scene.images.workers.prepared) == 1


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("an <image> here", "`inputs` contains <image>, which stands for an image"),
        ("![](data:image/png;base64,aGVsbG8=)", "invalid image: it is none of png, jpeg, gif, webp and tiff"),
        ("![](data:image/png;base64,a*)", "base64 encoding is invalid"),
        ("![](data:image/png)", "invalid image content: data:image/png"),
        ("![](http://x/z.png)", "Could not fetch image: status 404"),
        ("![](http://x)" * 4, "a request may have up to 3 images. Given: 4"),
        (f"![](data:;base64,{'A' * 200_000})", "exceeds maximum allowed size of 100000 bytes"),
    ],
)
async def test_refusals(inputs: str, words: str, make_scene: MakeScene) -> None:
    status, error = await make_scene().refusal("/generate", inputs=inputs)
    assert status == 422 and error.startswith("Input validation error: ") and words in error


async def test_refused_images_do_not_count(make_scene: MakeScene) -> None:
    scene = make_scene()
    await scene.refusal("/generate", inputs="![](data:image/png;base64,aGVsbG8=)")
    await scene.refusal("/generate", inputs="![](http://x/z.png)")
    for _ in range(2):
        await scene.post("/generate", inputs=f"![]({data_url(40, 50)})")
    counts = metrics_of(scene.images.metrics.render().decode())
    assert counts["tgi_image_count"] == counts["tgi_image_tokens_count"] == 2
    assert counts["tgi_image_prepare_duration_count"] == 1


async def test_pixels_are_limited_for_an_image_and_for_all_of_a_request(make_scene: MakeScene) -> None:
    scene = make_scene(max_pixels=2000)
    status, error = await scene.refusal("/generate", inputs=f"![]({data_url(40, 51)})")
    assert status == 422 and "invalid image: it has 51x40 pixels, the limit is 2000 in all" in error
    urls = [data_url(40, 50), data_url(40, 50), data_url(10, 10)]
    status, error = await scene.refusal("/generate", inputs="".join(f"![]({url})" for url in urls))
    assert status == 422 and "invalid image" in error


async def test_memory_that_others_fill_is_429_and_what_never_fits_422(make_scene: MakeScene) -> None:
    scene = make_scene()
    first, second = (f"![]({data_url(40, 50, seed)})" for seed in (0, 1))
    await scene.post("/generate", inputs=first)
    size = scene.images.store.num_bytes
    scene = make_scene(memory_bytes=size * 3 // 2)
    held = scene.images.store.add(PreparedImage(b"other", "", 1, None, {"x": Feature("bool", (size,), bytes(size))}))
    status, _ = await scene.refusal("/generate", inputs=first)
    assert status == 429 and scene.images.store.num_bytes == held.num_bytes == size
    del held
    assert (await scene.post("/generate", inputs=first + first)).status_code == 200
    status, error = await scene.refusal("/generate", inputs=first + second)
    assert status == 422 and "the images of the request take more than" in error


async def test_truncate_never_cuts_an_image(make_scene: MakeScene) -> None:
    scene = make_scene()
    inputs = f"The quick brown fox jumps ![]({data_url(40, 50)}) over the dog"
    await scene.post("/generate", inputs=inputs)
    length = scene.last.input_length
    place = scene.last.images[0].place
    await scene.post("/generate", inputs=inputs, parameters={"truncate": length - place.start + 1})
    assert scene.last.images[0].place.start == 1  # behind BOS
    for kept in (length - place.start, 5):
        status, error = await scene.refusal("/generate", inputs=inputs, parameters={"truncate": kept})
        assert status == 422 and "`truncate` would cut an image" in error


async def test_texts_and_token_ids_of_clients_name_no_image(make_scene: MakeScene) -> None:
    scene = make_scene(templates={"default": ITERATES})
    contents: list[Any] = ["an <image>", [{"type": "text", "text": "<image>"}]]
    for content in contents:
        messages = [{"role": "user", "content": content}]
        status, error = await scene.refusal("/v1/chat/completions", messages=messages)
        assert status == 400 and "`messages` contains <image>" in error
    status, error = await scene.refusal("/v1/completions", model="m", prompt=[5, scene.token_id])
    assert status == 400 and "`prompt` contains <image>" in error


async def test_a_template_that_shows_another_number_of_images_is_refused(make_scene: MakeScene) -> None:
    scene = make_scene(templates={"default": "{% for part in messages[0].content %}{% endfor %}hello"})
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(8, 8)}}]}]
    answer = await scene.post("/v1/chat/completions", messages=messages)
    assert is_invalid(answer) and "shows 0 images of a chat that has 1" in answer.text


async def test_prompt_logprobs_of_images_are_refused(make_scene: MakeScene) -> None:
    status, error = await make_scene().refusal(
        "/generate", inputs=f"![]({data_url(8, 8)})", parameters={"decoder_input_details": True, "details": True}
    )
    assert status == 422 and "prompts with images" in error


async def test_a_text_model_keeps_markers_as_text_and_refuses_parts(router: Router) -> None:
    await router.post("/generate", {"inputs": "a ![](http://x/y.png) <image>"})
    assert router.scheduler.last.inputs == "a ![](http://x/y.png) <image>" and router.scheduler.last.images == ()
    part = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    answer = await router.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert is_invalid(answer) and "the model reads text only" in answer.text
