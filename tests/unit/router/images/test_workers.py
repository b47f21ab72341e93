"""The processes that prepare images, from the router's side: limits, deaths, callers that leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from router_fakes import until
from support.pictures import picture, saved
from support.vision_settings import settings_folder

from router.errors import OverloadedError, StartupError, ValidationError
from router.images.workers import ImageWorkers
from wire.images import frames
from wire.images.frames import Job
from wire.images.prepared import PreparedImage
from wire.processes.shared_memory import SharedBytes, SharedMemory
from wire.worker.process import WorkerProcess

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


async def test_large_arrays_are_in_memory_that_is_shared_and_equal_those_of_the_pipe(folder: Path) -> None:
    sharing = ImageWorkers(folder, "bfloat16", num_workers=1, most_shared=9)
    piped = ImageWorkers(folder, "bfloat16", num_workers=1)
    try:
        for data, is_shared in ((picture(300, 400), True), (picture(30, 40), False)):
            one, other = await sharing.prepare(job(data)), await piped.prepare(job(data))
            assert (one.expansion, one.grid, one.num_bytes) == (other.expansion, other.grid, other.num_bytes)
            for name, feature in one.features.items():
                assert isinstance(feature.data, SharedBytes) == is_shared
                bytes_of = feature.data.read() if isinstance(feature.data, SharedBytes) else feature.data
                assert bytes_of == other.features[name].data
    finally:
        await asyncio.to_thread(sharing.close)
        await asyncio.to_thread(piped.close)


async def test_only_so_many_images_are_in_shared_memory_at_a_time(folder: Path) -> None:
    """Each is an open file of the router and of every shard."""
    workers = ImageWorkers(folder, "bfloat16", num_workers=1, most_shared=1)

    async def is_shared(seed: int) -> tuple[bool, PreparedImage]:
        image = await workers.prepare(job(picture(300, 400, seed)))
        (feature, *_) = image.features.values()
        return isinstance(feature.data, SharedBytes), image

    try:
        first = await is_shared(1)
        assert first[0] and not (await is_shared(2))[0]
        del first
        assert gc.collect() >= 0 and (await is_shared(3))[0]
    finally:
        await asyncio.to_thread(workers.close)


async def test_images_are_sent_where_no_more_files_may_be_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def create() -> SharedMemory:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(SharedMemory, "create", create)
    workers = ImageWorkers(folder, "bfloat16", num_workers=1, most_shared=9)
    try:
        for seed in (1, 2):
            assert isinstance(await workers.prepare(job(picture(300, 400, seed))), PreparedImage)
        assert caplog.text.count("no shared memory for images") == 1
    finally:
        await asyncio.to_thread(workers.close)


class Busy(WorkerProcess):
    """Has one frame until it is told to go on."""

    def __init__(self) -> None:
        super().__init__("no.module")
        self.has_frame, self.goes_on = threading.Event(), threading.Event()

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        self.has_frame.set()
        assert self.goes_on.wait(60)
        return frames.fault_to("too late")


async def test_memory_outlives_a_caller_that_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would write into whatever file has its number by then."""
    made: list[weakref.ref[SharedMemory]] = []
    create = SharedMemory.create

    def noted() -> SharedMemory:
        memory = create()
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(SharedMemory, "create", noted)
    workers = ImageWorkers(folder, "bfloat16", num_workers=1, most_shared=9)
    busy = workers._workers[0].process = Busy()
    try:
        leaving = asyncio.create_task(workers.prepare(job(b"x")))
        await asyncio.to_thread(busy.has_frame.wait, 60)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        del leaving
        gc.collect()
        assert made[0]() is not None
        busy.goes_on.set()
        with pytest.raises(ValidationError, match="too late"):
            await workers.prepare(job(b"x"))
        await until(lambda: gc.collect() >= 0 and all(one() is None for one in made))
    finally:
        busy.goes_on.set()
        await asyncio.to_thread(workers.close)


async def test_an_ordinary_image_overtakes_large_ones(folder: Path) -> None:
    """Of a few kilobytes each, and no more of them wait than take a minute or two."""
    workers = ImageWorkers(folder, "bfloat16", num_workers=1)
    busy = workers._workers[0].process = Busy()
    order: list[str] = []

    async def prepare(name: str, data: bytes) -> None:
        with contextlib.suppress(ValidationError):
            await workers.prepare(job(data))
        order.append(name)

    try:
        asked = [asyncio.create_task(prepare("first", picture(30, 40)))]
        await asyncio.to_thread(busy.has_frame.wait, 60)
        file = large()
        many = [asyncio.create_task(prepare("large", file)) for _ in range(40)]
        await asyncio.sleep(0)
        ordinary = asyncio.create_task(prepare("ordinary", picture(30, 40)))
        await asyncio.sleep(0)
        busy.goes_on.set()
        refused = await asyncio.gather(*asked, *many, ordinary, return_exceptions=True)
        assert order[:2] == ["first", "ordinary"]
        assert any(isinstance(error, OverloadedError) for error in refused) and order.count("large") > 10
    finally:
        busy.goes_on.set()
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
