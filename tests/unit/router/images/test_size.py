"""Pixels by the header of a file, before anything of it is decoded."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image
from support.harmful_pictures import HARMFUL
from support.pictures import pixels, saved

from router.images.size import pixels_of

_PICTURE = Image.fromarray(pixels(31, 45))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "JPEG", "WEBP"])
def test_the_pixels_of_every_format(kind: str) -> None:
    assert pixels_of(saved(_PICTURE, kind)) == 31 * 45


def test_the_kinds_of_webp_and_jpeg() -> None:
    def written(kind: str, image: Image.Image = _PICTURE, **options: object) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    assert pixels_of(written("WEBP", lossless=True)) == 31 * 45
    clear = np.dstack([pixels(31, 45), np.arange(31 * 45, dtype=np.uint8).reshape(31, 45)])
    assert pixels_of(written("WEBP", Image.fromarray(clear), exif=b"Exif\0\0abc")) == 31 * 45
    assert pixels_of(written("JPEG", progressive=True, icc_profile=bytes(200_000))) == 31 * 45


def test_what_has_no_header_that_is_known() -> None:
    assert pixels_of(saved(_PICTURE, "TIFF")) is None
    for made in HARMFUL.values():
        pixels_of(made())
    source = random.Random(3)
    for kind in ("PNG", "GIF", "JPEG", "WEBP"):
        whole = saved(_PICTURE, kind)
        for _ in range(200):
            data = bytearray(whole[: source.randrange(len(whole))])
            for _ in range(min(3, len(data))):
                data[source.randrange(len(data))] = source.randrange(256)
            found = pixels_of(bytes(data))
            assert found is None or found >= 0
