"""Types of blocks that hold whole numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.quantization.gguf.decoded import Decoded, halves, nibbles


def _q8_0(blocks: Tensor) -> Decoded:
    return Decoded((blocks[..., 2:] ^ 128).flatten(1), halves(blocks[..., :2]), 128, 32, 8)


def _q4_0(blocks: Tensor) -> Decoded:
    return Decoded(nibbles(blocks[..., 2:]).flatten(1), halves(blocks[..., :2]), 8, 32, 4)


def _q4_1(blocks: Tensor) -> Decoded:
    scales, least = halves(blocks[..., :2]), halves(blocks[..., 2:4])
    return Decoded(nibbles(blocks[..., 4:]).flatten(1), scales, 0, 32, 4, -least.float())


def _q5_0(blocks: Tensor) -> Decoded:
    codes = nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6]) << 4
    return Decoded(codes.flatten(1), halves(blocks[..., :2]), 16, 32, 5)


def _q5_1(blocks: Tensor) -> Decoded:
    codes = nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8]) << 4
    scales, least = halves(blocks[..., :2]), halves(blocks[..., 2:4])
    return Decoded(codes.flatten(1), scales, 0, 32, 5, -least.float())


def _q4_k(blocks: Tensor) -> Decoded:
    scales, offsets = _scales_and_offsets(blocks)
    return Decoded(nibbles_of_64(blocks[..., 16:]).flatten(1), scales, 0, 32, 4, offsets)


def _q5_k(blocks: Tensor) -> Decoded:
    scales, offsets = _scales_and_offsets(blocks)
    fifth = torch.stack([blocks[..., 16:48] >> bit & 1 for bit in range(8)], -2).flatten(-2)
    return Decoded((nibbles_of_64(blocks[..., 48:]) | fifth << 4).flatten(1), scales, 0, 32, 5, offsets)


def _q6_k(blocks: Tensor) -> Decoded:
    lower = nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    upper = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    upper = torch.stack([upper >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
    fine = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = (halves(blocks[..., 208:]).float().unsqueeze(-1) * fine).flatten(1)
    return Decoded((lower | upper << 4).flatten(1), scales, 32, 16, 6)


def _q2_k(blocks: Tensor) -> Decoded:
    fine = blocks[..., :16]
    factor, least = (halves(blocks[..., at : at + 2]).float().unsqueeze(-1) for at in (80, 82))
    scales, offsets = (factor * (fine & 15).float()).flatten(1), (least * (fine >> 4).float()).flatten(1)
    return Decoded(_pairs_of_128(blocks[..., 16:80]), scales, 0, 16, 2, offsets)


def _q3_k(blocks: Tensor) -> Decoded:
    upper = torch.stack([blocks[..., :32] >> bit & 1 for bit in range(8)], -2).flatten(1)
    packed = blocks[..., 96:108]
    lower = nibbles(packed[..., :8])
    higher = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    fine = (lower | higher << 4).float() - 32
    scales = (halves(blocks[..., 108:]).float().unsqueeze(-1) * fine).flatten(1)
    return Decoded(_pairs_of_128(blocks[..., 32:96]) | upper << 2, scales, 4, 16, 3)


def _tq1_0(blocks: Tensor) -> Decoded:
    """Read five digits of base three a byte, four of the last ones."""
    parts = [(blocks[..., :32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4)]
    digits = torch.cat([(part.unsqueeze(-2) * _powers(n, part.device)).flatten(-2) for part, n in parts], -1)
    codes = (digits.to(torch.int16) * 3 >> 8).to(torch.uint8)
    return Decoded(codes.flatten(1), halves(blocks[..., 52:]), 1, 256, 2)


def _powers(count: int, device: torch.device) -> Tensor:
    return torch.tensor([3**digit for digit in range(count)], dtype=torch.uint8, device=device).unsqueeze(-1)


def _tq2_0(blocks: Tensor) -> Decoded:
    return Decoded(_pairs_of_128(blocks[..., :64]), halves(blocks[..., 64:]), 1, 256, 2)


DECODERS: dict[str, Callable[[Tensor], Decoded]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip


def _pairs_of_128(packed: Tensor) -> Tensor:
    """Unpack two bits a number: of each 32 bytes all lowest first. [n, blocks, bytes] to [n, columns]."""
    runs = packed.reshape(*packed.shape[:-1], -1, 32)
    return torch.stack([runs >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(1)


def _fifth(bits: Tensor) -> Tensor:
    """Unpack eight bits a byte, lowest first: [..., bytes] to [..., 8 * bytes]."""
    return (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).flatten(-2)


def nibbles_of_64(packed: Tensor) -> Tensor:
    """`nibbles` of each 32 bytes."""
    return nibbles(packed.reshape(*packed.shape[:-1], -1, 32)).flatten(-2)


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Decode Q4_K and Q5_K: 6 bits for 8 groups, behind two factors; [n, groups] float32 each."""
    first, second, third = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    factor, least = (halves(blocks[..., at : at + 2]).float().unsqueeze(-1) for at in (0, 2))
    return (factor * scales.float()).flatten(1), (least * offsets.float()).flatten(1)
