"""The process that prepares images: without torch, bounded, one answer for each file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pictures import picture
from support.vision_settings import settings_folder

from wire.images import frames
from wire.images.prepared import Feature, PreparedImage
from wire.images.preparing import Preparer
from wire.processes.shared_memory import SharedBytes, SharedMemory
from wire.worker.frames import with_limit
from wire.worker.process import WorkerProcess

KEY = bytes(range(32))


def asked(process: WorkerProcess, data: bytes, **options: object) -> PreparedImage | str:
    job = frames.Job(KEY, data, 50_000_000, **options)  # type: ignore[arg-type]
    return frames.answer_from(process.exchange(with_limit(20, frames.job_to(job)), 60))


def test_the_process_answers_as_the_library_does_and_never_loads_torch(tmp_path: Path) -> None:
    folder = settings_folder(tmp_path, "qwen2_vl")
    process = WorkerProcess("wire.images.worker", (str(folder), "bfloat16"))
    try:
        assert asked(process, b"") == ""
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in loaded
        data = picture(60, 90)
        expected = Preparer(folder, "bfloat16").prepare(KEY, data, max_pixels=50_000_000)
        assert asked(process, data) == expected
        assert asked(process, picture(600, 900), detail="low") != asked(process, picture(600, 900))
        fault = asked(process, data[:100])
        assert fault == "the file is damaged or incomplete"
        assert isinstance(asked(process, picture(60, 90, format="GIF")), PreparedImage)
    finally:
        process.end()


def test_a_model_that_cannot_be_prepared_is_said_once_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    process = WorkerProcess("wire.images.worker", (str(tmp_path), "float32"))
    try:
        assert asked(process, b"") == "images of the model type llama are not served"
        assert asked(process, picture(8, 8)) == "images of the model type llama are not served"
    finally:
        process.end()


@pytest.mark.parametrize("grid", [None, (1, 2, 3)])
def test_an_image_travels_whole(grid: tuple[int, int, int] | None) -> None:
    features = {"a": Feature("bfloat16", (1, 3), b"abcdef"), "b": Feature("int64", (1, 1), bytes(8))}
    image = PreparedImage(KEY, "<image>", 6, grid, features, 7)
    assert frames.answer_from(frames.image_to(image)) == image


def test_arrays_that_are_large_stay_in_shared_memory() -> None:
    large, small = bytes(range(256)) * (frames.SHARED_FROM // 256), b"abcdefgh"
    features = {"a": Feature("bool", (len(large),), large), "b": Feature("int64", (1, 1), small)}
    image = PreparedImage(KEY, "<image>", 6, None, features, 7)
    memory = SharedMemory.create()
    answer = frames.image_to(image, memory.name)
    assert len(answer) < 1000
    found = frames.answer_from(answer, memory)
    assert isinstance(found, PreparedImage) and found.num_bytes == image.num_bytes
    for name, array in features.items():
        data = found.features[name].data
        assert isinstance(data, SharedBytes) and data.read() == array.data
    hidden = memory.name[:-1] + ("0" if memory.name[-1] != "0" else "1")
    assert frames.answer_from(frames.image_to(image, hidden), memory) == image  # a sandbox may keep others out
    few = PreparedImage(KEY, "<image>", 6, None, {"b": features["b"]}, 7)
    assert frames.answer_from(frames.image_to(few, memory.name), memory) == few


def test_a_job_travels_whole() -> None:
    job = frames.Job(KEY, b"\x00data", 5, "low", "1:2:ab")
    assert frames.job_from(frames.job_to(job)) == job
