"""A server on a model without a hub, and the requests that stages send it."""

from __future__ import annotations

import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.demo import prompt as words
from benchmarks.gpu.context import Context
from benchmarks.gpu.subjects.shapes import Shape
from benchmarks.gpu.subjects.synthetic import LETTERS, write_checkpoint
from benchmarks.server import Server

# Files in memory: a checkpoint of 16 GB is written and read in seconds.
IN_MEMORY = Path("/dev/shm")
MOST_TOKENS = 8192


@contextmanager
def model_folder(context: Context, shape: Shape | None) -> Iterator[Path]:
    """The user's model, or a checkpoint of the shape that is gone afterwards.

    Raises OSError where memory has no room for it.
    """
    if shape is None:
        assert context.model is not None
        yield context.model
        return
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    needed = shape_bytes(shape, dtype)
    places = [p for p in (IN_MEMORY, Path(tempfile.gettempdir())) if p.is_dir()]
    place = next((p for p in places if shutil.disk_usage(p).free > 1.1 * needed), None)
    if place is None:
        raise OSError(f"no room for a checkpoint of {needed / 1e9:.1f} GB in {', '.join(map(str, places))}")
    with tempfile.TemporaryDirectory(prefix="benchmark-model-", dir=place) as folder:
        yield write_checkpoint(shape, Path(folder) / shape.name.replace(" ", "-"), context.device, dtype)


def shape_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return sum(torch.Size(s).numel() for s in shape.tensors().values()) * dtype.itemsize


@contextmanager
def running(context: Context, folder: Path, *arguments: str, **environ: str) -> Iterator[Server]:
    """A server of one shard that lets in as many requests as any stage sends; stopped at the end if it still runs."""
    tokens = 1024 if context.tiny else MOST_TOKENS
    limits = ("--max-concurrent-requests", "1024", "--max-total-tokens", str(tokens), "--num-shard", "1")
    dtype = "bfloat16" if context.on_cuda else "float32"
    environ = ({} if context.on_cuda else {"CUDA_VISIBLE_DEVICES": ""}) | environ
    server = Server(free_port(), dtype, model=str(folder), arguments=(*limits, *arguments), **environ)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def text(length: int, seed: int, shape: Shape | None) -> str:
    """A prompt that no other has the beginning of: `length` tokens of a shape's tokenizer, about as many of another."""
    if shape is None:
        return words(seed, length)
    return "".join(random.Random(seed).choices(LETTERS, k=length))


def prompts(count: int, length: int, shape: Shape | None, seed: int) -> list[str]:
    """Prompts of `length` tokens, each its own."""
    return [text(length, 1_000_003 * seed + i, shape) for i in range(count)]
