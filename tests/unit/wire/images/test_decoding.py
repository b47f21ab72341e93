"""Files of all kinds, and such that were built to do harm."""

from __future__ import annotations

import io
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image
from support.harmful_pictures import many_scans
from support.pictures import picture, pixels, saved

from wire.images.decoding import ImageError, decode

MAX_PIXELS = 1_000_000


def decoded(data: bytes, **options: object) -> Image.Image:
    return decode(data, max_pixels=MAX_PIXELS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP", "TIFF", "JPEG"])
def test_five_formats_are_read(format: str) -> None:
    image = decoded(picture(20, 30, format=format))
    assert (image.size, image.mode) == ((30, 20), "RGB")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_all_modes_become_rgb(mode: str) -> None:
    values = pixels(8, 8)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(values).convert(mode)
    read = np.asarray(decoded(saved(image, "TIFF")))
    assert read.shape == (8, 8, 3)
    if mode == "I;16":
        assert np.array_equal(read[..., 0], values[..., 0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_picture_is_turned_as_exif_says(orientation: int) -> None:
    upright = Image.fromarray(pixels(8, 16))
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that undoes each
    stored = upright.transpose(Image.Transpose(back[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(np.asarray(decoded(saved(stored, exif=exif))), np.asarray(upright))


def test_only_the_first_frame_is_read() -> None:
    frames = [Image.fromarray(pixels(8, 8, seed)).convert("P") for seed in range(3)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(np.asarray(decoded(data)), np.asarray(frames[0].convert("RGB")))


def test_the_size_counts_before_a_pixel_is_decoded() -> None:
    bomb = picture(1000, 1001)[:60]  # there are no pixels behind the header
    with pytest.raises(ImageError, match="1001x1000 pixels, the limit is 1000000"):
        decoded(bomb)
    huge = b"\x00\x01\x86\xa0" * 2 + b"\x08\x02\x00\x00\x00"
    chunk = b"IHDR" + huge
    header = (13).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    png = b"\x89PNG\r\n\x1a\n" + header + (1000).to_bytes(4, "big") + b"IDAT" + bytes(9)
    with pytest.raises(ImageError, match="100000x100000 pixels"):
        decoded(png)


def test_scans_of_a_jpeg_are_bounded() -> None:
    image = decoded(many_scans(number=50))
    assert image.size == (500, 500) and image.getpixel((499, 499)) == (128, 128, 128)
    with pytest.raises(ImageError, match="more than 100 scans"):
        decoded(many_scans())


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.png", picture(8, 8))
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<!doctype html>",
        b"8BPS\x00\x01",
        b"P6 1 1 255 abc",
        zipped(),
        saved(Image.fromarray(pixels(8, 8)), "BMP"),
    ],
)
def test_other_kinds_of_files_are_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="none of png, jpeg, gif, webp and tiff"):
        decoded(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
def test_truncated_files_are_errors(format: str) -> None:
    data = picture(64, 64, format=format)
    for length in (len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(ImageError):
            decoded(data[:length])


def test_low_detail_is_small() -> None:
    assert decoded(picture(300, 900), detail="low").size == (512, 171)
    assert decoded(picture(300, 400), detail="low").size == (400, 300)
    assert decoded(picture(300, 900), detail="high").size == (900, 300)
