"""Memory and time of loading checkpoints of 1 GB: `PYTHONPATH=tests python -m benchmarks.load_memory [NAME ...]`.

NAME: `plain`, a format of `random_weights.FORMATS`, a type of GGUF files, `gpt_oss`, or a word of `--quantize` with
`on load` behind it. `arcee` in front: by the transformers runner. None: all.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support.loading_memory import Growth, measure
from support.random_checkpoints import write_checkpoint, write_gguf
from support.random_weights import FORMATS

from model_server.quantization.gguf.decode import DECODERS
from model_server.quantization.onload import QUANTIZERS

MEGABYTES = 1000
WIDE = 11 * 2048
"""Matrices of 92 MB in bfloat16."""


def main() -> None:
    """One line for each checkpoint; of plain ones, for each storage type, type of the model, and number of ranks."""
    on_load = [f"{method} on load" for method in QUANTIZERS]
    native = [*FORMATS, *DECODERS, "gpt_oss", *on_load]
    names = sys.argv[1:] or ["plain", *native, *(f"arcee {name}" for name in [*FORMATS, *on_load])]
    for name in names:
        with tempfile.TemporaryDirectory(prefix="load-memory-") as root:
            if name == "plain":
                plain(Path(root))
            else:
                report(name, quantized(name, Path(root)))


def plain(root: Path) -> None:
    for stored in ("float32", "bfloat16"):
        folder = write_checkpoint(root / stored, MEGABYTES, dtype=stored)
        for dtype in ("float32", "bfloat16"):
            for world_size in (1, 2):
                growth = measure(folder, rank=world_size - 1, world_size=world_size, dtype=dtype)
                report(f"{stored} as {dtype}, rank {world_size - 1} of {world_size}", growth)


def quantized(name: str, root: Path) -> Growth:
    model_type = "arcee" if name.startswith("arcee ") else "llama"
    name = name.removeprefix("arcee ")
    quantize = name.removesuffix(" on load") if name.endswith(" on load") else None
    if name in DECODERS:
        folder = write_gguf(root, MEGABYTES, name, WIDE)
    elif name == "gpt_oss":
        folder = write_checkpoint(root, MEGABYTES, dtype="bfloat16", model_type=name)
    else:
        method = name if quantize is None else None
        folder = write_checkpoint(
            root, MEGABYTES, dtype="bfloat16", method=method, inner=WIDE, model_type=model_type
        )  # fmt: skip
    return measure(folder, dtype="bfloat16", quantize=quantize)


def report(name: str, growth: Growth) -> None:
    share = growth.share or growth.end
    print(
        f"{name:32} weights {share / 1e6:5.0f} MB, end {growth.end / share:5.3f} of them, "
        f"peak {growth.peak / share:5.3f}: {(growth.peak - growth.end) / 2**20:4.0f} MiB above the end, "
        f"{growth.seconds:5.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
