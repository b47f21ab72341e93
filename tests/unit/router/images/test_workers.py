"""The processes that prepare images, from the router's side: limits, deaths, callers that leave."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.pictures import picture, saved
from support.vision_settings import settings_folder

from router.errors import StartupError, ValidationError
from router.images.workers import ImageWorkers
from wire.images.frames import Job
from wire.images.prepared import PreparedImage

MAX_PIXELS = 50_000_000


def job(data: bytes, max_pixels: int = MAX_PIXELS) -> Job:
    return Job(bytes(32), data, max_pixels)


def large() -> bytes:
    """A file of some kilobytes with 49 megapixels, which take seconds and gigabytes to prepare."""
    return saved(Image.fromarray(np.zeros((7000, 7000), np.uint8)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return settings_folder(tmp_path_factory.mktemp("qwen"), "qwen2_vl")


async def test_limits_deaths_and_callers_that_leave(folder: Path) -> None:
    workers = ImageWorkers(folder, "bfloat16", num_workers=1)
    try:
        await workers.start()
        assert isinstance(await workers.prepare(job(picture(30, 40))), PreparedImage)
        with pytest.raises(ValidationError, match="the limit is 100 in all"):
            await workers.prepare(job(picture(30, 40), 100))

        leaving = asyncio.create_task(workers.prepare(job(large())))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert isinstance(await workers.prepare(job(picture(30, 40))), PreparedImage)

        workers._limit_s = 0.2
        with pytest.raises(ValidationError, match=r"invalid image: it takes more than 0\.2 s to decode"):
            await workers.prepare(job(large()))
        workers._limit_s = 60.0
        assert isinstance(await workers.prepare(job(picture(30, 40))), PreparedImage)

        pid = workers._workers[0].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await workers.prepare(job(picture(30, 40))), PreparedImage)
    finally:
        await asyncio.to_thread(workers.close)


async def test_a_model_that_cannot_be_prepared_says_why_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    made = ImageWorkers(tmp_path, "float32", num_workers=1)
    try:
        with pytest.raises(StartupError, match="llama are not served"):
            await made.start()
    finally:
        await asyncio.to_thread(made.close)


def test_keys_follow_the_file_the_detail_and_the_settings(folder: Path, tmp_path: Path) -> None:
    one = ImageWorkers(folder, "bfloat16", num_workers=1)
    keys = {
        one.key(b"a", "auto"), one.key(b"b", "auto"), one.key(b"a", "low"),
        ImageWorkers(folder, "float32", num_workers=1).key(b"a", "auto"),
        ImageWorkers(settings_folder(tmp_path, "qwen3_vl"), "bfloat16", num_workers=1).key(b"a", "auto"),
    }  # fmt: skip
    assert len(keys) == 5 and all(len(key) == 32 for key in keys)
    assert one.key(b"a", "auto") == ImageWorkers(folder, "bfloat16", num_workers=2).key(b"a", "auto")
