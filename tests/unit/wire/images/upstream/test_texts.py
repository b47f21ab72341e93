"""Texts of prompts, and types of files."""

from __future__ import annotations

import pytest
from PIL import Image
from support.pictures import saved

from wire.images.upstream.texts import mimetype, prompt_text

FAKE = "<fake_token_around_image>"


def test_prompt_texts() -> None:
    assert prompt_text("llava_next", ["a", "b", ""], ["<image>", "<image>"]) == "a<image>b<image>"
    image = f"{FAKE}<image>{FAKE}"
    assert prompt_text("idefics2", ["a", "", "b"], [image, image]) == f"a{FAKE}<image>{FAKE}<image>{FAKE}b"
    assert prompt_text("paligemma", ["", "b"], ["<image>"]) == "<image><bos>b\n"
    assert prompt_text("paligemma", ["a", "b"], ["<image>"]) == "<bos>a\n<image><bos>b\n"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
def test_mimetypes(format: str) -> None:
    assert mimetype(saved(Image.new("RGB", (8, 8)), format)) == f"image/{format.lower()}"
    assert mimetype(b"other") == "application/octet-stream"
