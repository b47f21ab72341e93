"""Files that were built to do harm, in the process that prepares images: refused or read, and the next one is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.harmful_pictures import HARMFUL, RARE, mode_picture, turned_picture
from support.pictures import picture
from support.vision_settings import settings_folder

from router.errors import ValidationError
from router.images.workers import ImageWorkers
from wire.images.frames import Job

MAX_PIXELS = 50_000_000
SLOW = ("49 megapixels", "a line")
"""They become hundreds of megapixels before they are cut to the size that the tower takes."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageWorkers]:
    one = ImageWorkers(settings_folder(tmp_path_factory.mktemp("llava"), "llava"), "bfloat16", num_workers=1)
    asyncio.run(one.start())
    yield one
    one.close()


async def outcome(workers: ImageWorkers, data: bytes) -> str:
    """What became of it; the process must still be the same, and read the next picture."""
    pid = workers._workers[0].process.pid
    try:
        image = await workers.prepare(Job(bytes(32), data, MAX_PIXELS))
        said = f"{image.num_embeds} tokens"
    except ValidationError as error:
        said = str(error)
    assert (await workers.prepare(Job(bytes(32), picture(20, 20), MAX_PIXELS))).num_pixels == 400
    assert workers._workers[0].process.pid == pid
    return said


@pytest.mark.parametrize("name", sorted(HARMFUL))
async def test_harmful_files_are_refused(name: str, workers: ImageWorkers) -> None:
    _, _, reason = (await outcome(workers, HARMFUL[name]())).partition("invalid image: ")
    assert reason


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in sorted(RARE)]
)
async def test_rare_files_are_read_or_refused(name: str, workers: ImageWorkers) -> None:
    said = await outcome(workers, RARE[name]())
    assert said == "576 tokens" or "invalid image: " in said
    if name in ("10^5 frames", "10^5 directories", "one pixel", "three pixels"):
        assert said == "576 tokens"


async def test_modes_and_orientations_are_read(workers: ImageWorkers) -> None:
    files = [mode_picture(mode) for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16")]
    for data in [*files, *(turned_picture(orientation) for orientation in range(1, 9))]:
        assert (await workers.prepare(Job(bytes(32), data, MAX_PIXELS))).num_embeds == 576
