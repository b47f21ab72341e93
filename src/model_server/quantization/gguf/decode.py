"""Decodes rows of GGUF blocks."""

from __future__ import annotations

from torch import Tensor

from model_server.quantization.gguf import numbers, tables
from model_server.quantization.gguf.decoded import Decoded
from model_server.weights.gguf.header import BLOCKS

DECODERS = {**numbers.DECODERS, **tables.DECODERS}


def decode(raw: Tensor, kind: str) -> Decoded:
    """Decode raw [n, bytes of a row] uint8, blocks of type `kind`."""
    blocks = raw.view(raw.shape[0], -1, BLOCKS[kind][1])
    return DECODERS[kind](blocks)
