"""The image processes, from the router's side."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from router.errors import StartupError
from router.images.asked import invalid
from router.images.size import pixels_of
from router.worker.lane import Lane
from router.worker.pair import QueuedWorker
from wire.images import frames
from wire.images.frames import Job
from wire.images.prepared import Detail, PreparedImage
from wire.processes.shared_memory import SharedMemory
from wire.worker.process import WorkerEndedError

logger = logging.getLogger(__name__)

LIMIT_S = 10.0
_MODULE = "wire.images.worker"
_PIXELS_OF_A_BYTE = 4
"""A photo in JPEG has a byte for four or more; the largest picture may have some kilobytes."""
_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json")


class ImageWorkers:
    """Processes that prepare one model's images, one each."""

    def __init__(
        self, folder: Path, dtype: str, *, num_workers: int, limit_s: float = LIMIT_S, most_shared: int = 0
    ) -> None:
        """Set up the processes.

        Args:
            dtype: Torch's name.
            limit_s: Of one image.
            most_shared: Images in memory that shards open, each an open file.
        """
        self._most_shared = most_shared
        self._shared: set[str] = set()  # by name; what is shared may end in any thread
        self._warned = False
        self._limit_s = limit_s
        self._settings = _digest(folder, dtype)
        arguments = (str(folder), dtype)
        self._workers = [QueuedWorker(_MODULE, Lane(f"images-{i}"), arguments) for i in range(num_workers)]
        self._num_jobs = [0] * num_workers

    async def start(self) -> None:
        """Wait for the first process, if images can be prepared."""
        for worker in self._workers[1:]:
            worker.warm_up()
        try:
            asked = partial(frames.job_to, Job(b"", b"", 0))
            fault = frames.answer_from(await self._workers[0].ask(0, asked, self._limit_s))
        except (OSError, TimeoutError) as error:
            raise StartupError(f"the process that prepares images cannot be started: {error}") from None
        if fault:
            raise StartupError(str(fault))

    def key(self, data: bytes, detail: Detail) -> bytes:
        """Hash equal preparations; milliseconds for megabytes."""
        digest = hashlib.sha256(self._settings)
        digest.update(detail.encode().ljust(8))
        digest.update(data)
        return digest.digest()

    async def prepare(self, job: Job) -> PreparedImage:
        """Prepare a file's image."""
        if not job.data:  # the process would take it for a question whether it is there
            raise invalid("the file is empty")
        memory = self._memory()
        if memory is not None:
            job = replace(job, memory=memory.name)
        index = min(range(len(self._workers)), key=self._num_jobs.__getitem__)
        self._num_jobs[index] += 1
        try:
            answer = await self._workers[index].ask(_cost(job), partial(_job_to, job, memory), self._limit_s)
        except TimeoutError:
            raise invalid(f"it takes more than {self._limit_s:g} s to decode") from None
        except WorkerEndedError:
            raise invalid("it takes too much memory or time to decode") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: closed in the meantime
            logger.error("the process that prepares images cannot be started: %s", error)
            raise invalid("it cannot be decoded at the moment") from None
        finally:
            self._num_jobs[index] -= 1
        image = await asyncio.to_thread(frames.answer_from, answer, memory)
        if isinstance(image, str):
            raise invalid(image)
        return image

    def _memory(self) -> SharedMemory | None:
        """Return shared memory for an image, or None for the pipe."""
        if len(self._shared) >= self._most_shared:
            return None
        try:
            memory = SharedMemory.create()
        except OSError as error:
            if not self._warned:
                logger.warning("no shared memory for images, which are sent to the model server: %s", error)
            self._warned = True
            return None
        self._shared.add(memory.name)
        weakref.finalize(memory, self._shared.discard, memory.name).atexit = False
        return memory

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        for worker in self._workers:
            worker.close()


def _cost(job: Job) -> int:
    """Weigh jobs so that ordinary pictures do not wait for large ones."""
    pixels = pixels_of(job.data)
    most = job.max_pixels if pixels is None else min(pixels, job.max_pixels)
    return max(len(job.data), most // _PIXELS_OF_A_BYTE)


def _job_to(job: Job, memory: SharedMemory | None) -> bytes:
    """Frame a job; `memory` is kept as long as the process has it."""
    return frames.job_to(job)


def _digest(folder: Path, dtype: str) -> bytes:
    """Hash all besides the file that decides a prepared image."""
    parts: Sequence[bytes] = [
        dtype.encode(),
        *(importlib.metadata.version(package).encode() for package in ("transformers", "pillow")),
        *((folder / name).read_bytes() if (folder / name).is_file() else b"" for name in _SETTINGS),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.digest()
