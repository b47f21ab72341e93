"""Matrices as marlin and ExLlamaV2 write them, by placing one number after the other."""

from __future__ import annotations

import random

import torch
from support.quantized import stream, streams
from support.quantized_folder import Store, Stored
from torch import Tensor


def marlin(codes: Tensor, scales: Tensor) -> Stored:
    """codes [out, in] below 16; scales [out, groups]."""
    num_rows, num_columns = codes.shape
    words = []
    for top in range(0, num_columns, 16):
        line: list[int] = []
        for left in range(0, num_rows, 64):
            ordered = [0] * 1024
            for i in range(32):
                for j in range(4):
                    for beta in range(2):
                        for rho in range(4):
                            k, n = 2 * (i % 4) + rho % 2 + 8 * (rho // 2), i // 4 + 8 * beta
                            ordered[32 * i + 8 * j + 4 * beta + rho] = int(codes[left + 16 * j + n, top + k])
            for first in range(0, 1024, 8):
                line += stream([ordered[first + place] for place in (0, 2, 4, 6, 1, 3, 5, 7)], 4)
        words.append(line)
    s = torch.empty(scales.shape[1], num_rows)
    for group in range(scales.shape[1]):
        for position in range(num_rows):
            if scales.shape[1] > 1:
                start, i, j = position // 64 * 64, position % 64 // 8, position % 8
                source = start + i + 8 * j
            else:
                start, i, t = position // 32 * 32, position % 32 // 8, position % 8
                source = start + 2 * i + (0, 1, 8, 9, 16, 17, 24, 25)[t]
            s[group, position] = scales[source, group]
    return {"B": torch.tensor(words, dtype=torch.int32), "s": s.half()}


def exl2(weight: Tensor, bits: list[int], seed: int = 0) -> tuple[Stored, Tensor]:
    """`weight` [out, in] in groups of 32 columns (the last may be longer) with these bits in turn, in a random order of
    columns; and what is stored of it."""
    num_rows, num_columns = weight.shape
    dice = random.Random(seed)
    order = list(range(num_columns))  # stored column -> input
    dice.shuffle(order)
    starts = list(range(0, num_columns, 32))
    words: list[Tensor] = []
    groups: list[int] = []
    nibbles = torch.tensor([[dice.randrange(16) for _ in range(num_rows)] for _ in starts])
    most = torch.tensor([0.5 + dice.random() for _ in starts]).half()
    exact = torch.empty_like(weight)
    for number, start in enumerate(starts):
        width = bits[number % len(bits)]
        inputs = order[start : start + 32]
        scales = (nibbles[number] + 1).float().square() * (most[number].float() / 256)
        codes = (weight[:, inputs] / scales[:, None]).round().add(2 ** (width - 1)).clamp(0, 2**width - 1).long()
        exact[:, inputs] = (codes - 2 ** (width - 1)).float() * scales[:, None]
        groups += [width, sum(len(part) for part in words)]
        words.append(streams(codes, width).t())
    places = torch.empty(num_columns, dtype=torch.int32)
    places[torch.tensor(order)] = torch.arange(num_columns, dtype=torch.int32)
    tensors = {
        "q_weight": torch.cat(words).contiguous(), "q_scale": streams(nibbles, 4), "q_scale_max": most,
        "q_groups": torch.tensor(groups, dtype=torch.int16), "q_invperm": places,
    }  # fmt: skip
    return tensors, exact


def store_as(method: str) -> Store:
    """method: marlin, in 4 bits with a scale for each row, or exl2, in 3 to 6 bits."""

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor] | None:
        if method == "exl2":
            return exl2(weight.float(), [4, 6, 3])
        if weight.shape[0] % 64:
            return None  # the kernel's tiles do not fit
        scales = (weight.float().abs().amax(1, keepdim=True) / 7).half().float()
        codes = (weight.float() / scales).round().add(8).clamp(0, 15).long()
        return marlin(codes, scales), (codes - 8) * scales

    return store
