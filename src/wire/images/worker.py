"""Prepares images for the router: `python -m wire.images.worker FOLDER DTYPE`, in 2 GiB and a timed fork."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol, cast

# Nothing here needs torch, which would take seconds and hundreds of megabytes. transformers looks whether it is there.
sys.modules["torch"] = cast(Any, None)
sys.modules["torchvision"] = cast(Any, None)

from wire.images import frames  # noqa: E402
from wire.images.decoding import ImageError  # noqa: E402
from wire.images.prepared import Detail, PreparedImage  # noqa: E402
from wire.images.preparing import ModelType, Preparer, UnpreparableError  # noqa: E402
from wire.worker.forked import Forked, JobEndedError  # noqa: E402
from wire.worker.main import serve  # noqa: E402

MEMORY_LIMIT = 2 << 30
_CPU_LIMIT_S = 30
_TOO_LARGE = "it takes too much memory or time to decode"


class Prepares(Protocol):
    """Makes of a file what is sent of it."""

    def prepare(self, key: bytes, data: bytes, *, max_pixels: int, detail: Detail) -> PreparedImage:
        """Raises ImageError, and MemoryError."""
        ...


def prepared(preparer: Prepares, job: frames.Job) -> bytes:
    """The answer to a job."""
    try:
        image = preparer.prepare(job.key, job.data, max_pixels=job.max_pixels, detail=job.detail)
        return frames.image_to(image, job.memory)
    except ImageError as error:
        return frames.fault_to(str(error))
    except (MemoryError, OSError):  # OSError: of shared memory
        return frames.fault_to(_TOO_LARGE)


def main() -> None:
    """Serve until the router closes the pipe."""
    folder, dtype = sys.argv[1:]
    fault, preparer = "", cast(Prepares | None, None)
    try:
        preparer = Preparer(Path(folder), cast(ModelType, dtype))
    except UnpreparableError as error:
        fault = str(error)
    forked = Forked()

    def answer(asked: bytes, limit_s: float) -> bytes:
        job = frames.job_from(asked)
        if preparer is None or not job.data:
            return frames.fault_to(fault)
        try:
            return forked.run(lambda: prepared(preparer, job), limit_s)
        except JobEndedError:
            return frames.fault_to(_TOO_LARGE)

    serve(answer, memory_limit=MEMORY_LIMIT, cpu_limit_s=_CPU_LIMIT_S)


if __name__ == "__main__":
    main()
