"""GGUF blocks as codes, scales, and offsets per group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.weights.gguf.header import BLOCKS


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of a matrix: `(codes[i, k] - zero) * scales[i, g] - offsets[i, g]`, where g = k // group."""

    codes: Tensor
    scales: Tensor
    zero: int
    group: int
    bits: int
    offsets: Tensor | None = None


def decode(raw: Tensor, kind: str) -> Decoded:
    """Decode raw [n, bytes of a row] uint8, blocks of type `kind`."""
    blocks = raw.view(raw.shape[0], -1, BLOCKS[kind][1])
    return DECODERS[kind](blocks)


def _q8_0(blocks: Tensor) -> Decoded:
    return Decoded((blocks[..., 2:] ^ 128).flatten(1), _halves(blocks[..., :2]), 128, 32, 8)


def _q4_0(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 2:]).flatten(1), _halves(blocks[..., :2]), 8, 32, 4)


def _q4_1(blocks: Tensor) -> Decoded:
    scales, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return Decoded(_nibbles(blocks[..., 4:]).flatten(1), scales, 0, 32, 4, -least.float())


def _q5_0(blocks: Tensor) -> Decoded:
    codes = _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6]) << 4
    return Decoded(codes.flatten(1), _halves(blocks[..., :2]), 16, 32, 5)


def _q5_1(blocks: Tensor) -> Decoded:
    codes = _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8]) << 4
    scales, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return Decoded(codes.flatten(1), scales, 0, 32, 5, -least.float())


def _q4_k(blocks: Tensor) -> Decoded:
    scales, offsets = _scales_and_offsets(blocks)
    return Decoded(_nibbles_of_64(blocks[..., 16:]).flatten(1), scales, 0, 32, 4, offsets)


def _q5_k(blocks: Tensor) -> Decoded:
    scales, offsets = _scales_and_offsets(blocks)
    fifth = torch.stack([blocks[..., 16:48] >> bit & 1 for bit in range(8)], -2).flatten(-2)
    return Decoded((_nibbles_of_64(blocks[..., 48:]) | fifth << 4).flatten(1), scales, 0, 32, 5, offsets)


def _q6_k(blocks: Tensor) -> Decoded:
    lower = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    upper = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    upper = torch.stack([upper >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
    fine = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = (_halves(blocks[..., 208:]).float().unsqueeze(-1) * fine).flatten(1)
    return Decoded((lower | upper << 4).flatten(1), scales, 32, 16, 6)


DECODERS: dict[str, Callable[[Tensor], Decoded]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip


def _halves(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def _fifth(bits: Tensor) -> Tensor:
    """Unpack eight bits a byte, lowest first: [..., bytes] to [..., 8 * bytes]."""
    return (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).flatten(-2)


def _nibbles(packed: Tensor) -> Tensor:
    """Split all lower, then all upper four bits."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _nibbles_of_64(packed: Tensor) -> Tensor:
    """`_nibbles` of each 32 bytes."""
    return _nibbles(packed.reshape(*packed.shape[:-1], -1, 32)).flatten(-2)


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Decode Q4_K and Q5_K: 6 bits for 8 groups, behind two factors; [n, groups] float32 each."""
    first, second, third = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    factor, least = (_halves(blocks[..., at : at + 2]).float().unsqueeze(-1) for at in (0, 2))
    return (factor * scales.float()).flatten(1), (least * offsets.float()).flatten(1)
