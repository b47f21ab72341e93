"""Memory and time of loading a checkpoint of 1 GB: `PYTHONPATH=tests python -m benchmarks.load_memory [MEGABYTES]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support.loading_memory import measure, write_checkpoint


def main() -> None:
    """One line for each storage type, type of the model, and number of ranks."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory(prefix="load-memory-") as root:
        for stored in ("float32", "bfloat16"):
            folder = write_checkpoint(Path(root) / stored, megabytes, dtype=stored)
            for dtype in ("float32", "bfloat16"):
                for world_size in (1, 2):
                    growth = measure(folder, rank=world_size - 1, world_size=world_size, dtype=dtype)
                    print(
                        f"stored {stored:8}  model {dtype:8}  rank {world_size - 1} of {world_size}: "
                        f"share {growth.share / 1e6:6.0f} MB, peak {growth.ratio:5.3f}, "
                        f"end {growth.end / growth.share:5.3f} of it, {growth.seconds:5.2f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
