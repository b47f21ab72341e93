"""Files of a model on a hub, and how a test fetches them."""

from __future__ import annotations

import json
from pathlib import Path

from model_server.weights.download.download import download

ID = "org/name"


def safetensors(num_bytes: int, seed: int = 0) -> bytes:
    """A valid file that holds one tensor of `num_bytes` bytes, different in every place."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    header += b" " * (-len(header) % 8)
    body = b"".join(((n * 2654435761 + seed) & 0xFFFFFFFF).to_bytes(4, "little") for n in range(-(-num_bytes // 4)))
    return len(header).to_bytes(8, "little") + header + body[:num_bytes]


SMALL = safetensors(1000)
LARGE = safetensors(300_000)
SIDE = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "README.md": b"# hello"}


def fetch(revision: str | None = None) -> Path:
    return download(ID, revision, wait_s=0)


def weights_of(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()
