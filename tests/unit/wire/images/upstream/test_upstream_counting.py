"""Image tokens of files for model servers of upstream TGI, against numbers of its own tests and its rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support.pictures import picture, pixels, saved
from support.vision_settings import SETTINGS, settings_folder

from wire.images.decoding import ImageError
from wire.images.preparing import Preparer, UnpreparableError
from wire.images.upstream.counting import FileCounter

MAX_PIXELS = 3_000_000
MakeCounter = Callable[..., FileCounter]


@pytest.fixture
def make_counter(tmp_path: Path) -> MakeCounter:
    def make(name: str, **settings: object) -> FileCounter:
        settings_folder(tmp_path, name)
        path = tmp_path / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return FileCounter(tmp_path)

    return make


def counted(counter: FileCounter, height: int, width: int) -> int:
    image = counter.prepare(b"k" * 32, picture(height, width), max_pixels=MAX_PIXELS)
    assert not image.features and image.num_pixels == height * width
    return image.num_embeds


def test_llava_next_has_the_numbers_of_upstream_and_refuses_what_its_server_cannot_fill(
    make_counter: MakeCounter,
) -> None:
    counter = make_counter("llava_next")
    sizes = ((20, 20), (640, 640), (480, 640), (899, 1024), (1024, 899), (1067, 1600))
    assert [counted(counter, *size) for size in sizes] == [1176, 2928, 2340, 2634, 2640, 2144]
    for size in ((100, 1000), (1000, 100), (224, 448)):  # it would write 626, 626 and 876 tokens for more rows
        with pytest.raises(ImageError, match="miscounts"):
            counted(counter, *size)


def test_idefics3_is_reduced_to_1456_pixels_whatever_the_settings_say(make_counter: MakeCounter) -> None:
    counter = make_counter("idefics3", size={"longest_edge": 728})
    assert [counted(counter, *size) for size in ((224, 224), (480, 640))] == [2873, 2197]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_narrow_images_of_qwen_are_doubled(name: str, make_counter: MakeCounter) -> None:
    counter = make_counter(name)
    assert [counted(counter, 300, width) for width in (20, 21)] == [21, 11]
    assert counted(counter, 480, 640) == 391


def test_fixed_numbers(make_counter: MakeCounter) -> None:
    assert counted(make_counter("gemma3"), 50, 70) == 256
    assert counted(make_counter("paligemma"), 50, 70) == 256
    assert counted(make_counter("idefics2"), 50, 70) == 320
    assert counted(make_counter("idefics2", do_image_splitting=False), 50, 70) == 64
    assert counted(make_counter("mllama"), 50, 70) == 1


def test_images_are_not_turned(make_counter: MakeCounter) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = saved(Image.fromarray(pixels(56, 560)), exif=exif)
    counter = make_counter("qwen2_vl")
    image = counter.prepare(b"k" * 32, file, max_pixels=MAX_PIXELS)
    turned = Preparer(settings_folder(Path(counter._preparer.config.name_or_path), "qwen2_vl"), "float32").prepare(
        b"k" * 32, file, max_pixels=MAX_PIXELS
    )
    assert turned.grid == (1, 20, 2) and image.num_embeds == 40
    assert counter._preparer.read(Image.fromarray(pixels(56, 560)))[1].rows == 2


def test_what_is_refused(make_counter: MakeCounter, tmp_path: Path) -> None:
    counter = make_counter("gemma3")
    with pytest.raises(ImageError, match="`detail`"):
        counter.prepare(b"k" * 32, picture(50, 70), max_pixels=MAX_PIXELS, detail="low")
    with pytest.raises(ImageError, match="damaged"):
        counter.prepare(b"k" * 32, picture(50, 70)[:-60], max_pixels=MAX_PIXELS)
    for name in ("llava", "pixtral", "smolvlm", "qwen3_vl"):
        with pytest.raises(UnpreparableError, match="upstream TGI reads no images"):
            FileCounter(settings_folder(tmp_path / name, name))
    assert SETTINGS
