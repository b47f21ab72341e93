"""Prompts with images for model servers of upstream TGI: files between texts, and exactly as many tokens as they make.

`UpstreamPrompts` stands in for what such a server makes of the message.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from router_fakes import INFO, LIMITS, Router
from support.image_fakes import Images
from support.pictures import picture, saved
from support.upstream_prompts import FAKE, UpstreamPrompts
from support.vision_settings import settings_folder
from tokenizers import AddedToken, Tokenizer

from router.shards import convert
from router.shards.interface import NewBatch, NewRequest
from wire.images.families import FAMILIES
from wire.images.upstream.texts import TYPES
from wire.v3 import generate_pb2 as pb

LARGE = replace(LIMITS, max_input_tokens=9000, max_total_tokens=9500)
ITERATES = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
OFTEN = {"idefics3", "paligemma", "qwen2_vl"}  # tokens around images, around all the text, a marker of three tokens
OTHERS = (
    "<bos>", FAKE, "<global-img>", "<row_1_col_1>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
    "<|tile_y_separator|>", "<start_of_image>", "<end_of_image>", "<|vision_start|>", "<|vision_end|>", "<|image|>",
)  # fmt: skip


class Scene:
    def __init__(self, router: Router, images: Images, shard: UpstreamPrompts) -> None:
        self.router, self.images, self.shard = router, images, shard

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = await self.router.post(path, body)
        self.router.assert_idle()
        return answer.status_code, answer.json()

    def sent(self) -> pb.Request:
        """The last request, as it goes to the shards."""
        request = self.router.scheduler.last
        new = NewRequest(1, request, blocks=[1], slots=range(1, 17), cache_len=0)
        batch = convert.batch_to(NewBatch(1, [new], max_tokens=2048, max_blocks=1), frozenset())
        (message,) = pb.Batch.FromString(batch.SerializeToString()).requests
        assert not message.input_ids and not message.images and not request.images
        assert tuple(self.shard.cut(message)) == request.input_ids and request.input_length == len(request.input_ids)
        return message

    def chunks(self) -> list[str | bytes]:
        chunks = self.sent().input_chunks.chunks
        return [chunk.text if chunk.WhichOneof("chunk") == "text" else chunk.image.data for chunk in chunks]


MakeScene = Callable[[str], Scene]


@pytest.fixture
def make_scene(tokenizer: Tokenizer, make_router: Callable[..., Router], tmp_path: Path) -> MakeScene:
    def make(name: str) -> Scene:
        family = FAMILIES[name]
        templates = {"default": ITERATES.replace("MARKER", family.marker)}
        router = make_router(info=replace(INFO, extensions=frozenset()), limits=LARGE, templates=templates)
        router.tokenizer.close()
        with_image = Tokenizer.from_str(tokenizer.to_str())
        with_image.add_special_tokens([AddedToken(one, special=True) for one in (family.image_token, *OTHERS)])
        router.tokenizer.__init__(with_image, num_workers=1)  # type: ignore[misc]
        token_id = router.tokenizer.added_tokens[family.image_token]
        folder = settings_folder(tmp_path, name)
        images = Images(folder, token_id, family=name, upstream=True, max_pixels=1_000_000)
        router.inference.validator.images = images.prompts
        return Scene(router, images, UpstreamPrompts(folder, with_image))

    return make


def marked(data: bytes) -> str:
    return f"![](data:image/png;base64,{base64.b64encode(data).decode()})"


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.parity) for name in sorted(TYPES)]
)
async def test_files_and_counts_of_every_type_that_upstream_reads(name: str, make_scene: MakeScene) -> None:
    scene = make_scene(name)
    first, second = picture(480, 640, format="JPEG"), picture(19, 19, 2, format="GIF")
    for text, expected in (
        ("only text", ["only text"]),
        (f"The {marked(first)} fox", ["The ", first, " fox"]),
        (marked(first), [first]),
        (f"{marked(first)}{marked(second)} differ", [first, second, " differ"]),
    ):
        status, answer = await scene.post("/generate", inputs=text)
        assert status == 200, answer
        assert scene.chunks() == expected
    assert [one.mimetype for one in scene.shard.files] == ["image/jpeg", "image/gif"]

    content = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": marked(second)[4:-1]}},
        {"type": "text", "text": " well"},
    ]
    chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
    status, answer = await scene.post("/v1/chat/completions", **chat)
    assert status == 200, answer
    assert scene.chunks() == ["Look: ", second, " well"] and not scene.sent().add_special_tokens


async def test_truncate_cuts_text_and_never_an_image(make_scene: MakeScene) -> None:
    scene = make_scene("qwen2_vl")
    seen = picture(56, 56)  # four tokens between two
    text = f"some words before the image {marked(seen)} fox"
    status, _ = await scene.post("/generate", inputs=text, parameters={"truncate": 12})
    assert status == 200 and scene.sent().truncate == 12
    assert scene.router.scheduler.last.input_length == 12
    status, answer = await scene.post("/generate", inputs=text, parameters={"truncate": 5})
    assert status == 422 and "`truncate` would cut an image" in answer["error"]


async def test_refusals(make_scene: MakeScene) -> None:
    scene = make_scene("qwen2_vl")
    url = marked(picture(56, 56))[4:-1]
    content = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
    status, answer = await scene.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert status == 400 and "not with `detail` low" in str(answer)
    large = saved(Image.new("RGB", (2000, 999)))
    for data, said in ((picture(56, 56)[:-50], "damaged"), (b"text", "none of png"), (large, "pixels")):
        status, answer = await scene.post("/generate", inputs=f"The {marked(data)} fox")
        assert status == 422 and said in answer["error"] and answer["error_type"] == "validation"
    seen = marked(picture(480, 640, format="JPEG"))
    limited = replace(LIMITS, max_input_tokens=10, max_total_tokens=20)
    scene.router.inference.validator._limits = limited
    status, answer = await scene.post("/generate", inputs=f"The {seen}", parameters={"max_new_tokens": 1})
    assert status == 422 and "`inputs` tokens + `max_new_tokens` must be" in answer["error"]
    assert not scene.router.scheduler.submitted


async def test_token_ids_for_paligemma_are_refused_because_its_server_adds_to_every_text(make_scene: MakeScene) -> None:
    scene = make_scene("paligemma")
    status, answer = await scene.post("/v1/completions", model="m", prompt=[5, 6, 7])
    assert status == 400 and "prompts of token ids are not supported" in str(answer)
