"""Convolutions over the cache: any cut of a sequence, and any company, gives the same bits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from parity.protocol import attention_metadata
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.cpp.library import usable
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.decoder.mixers.short_conv import kept_inputs
from model_server.recurrence.convolution import TorchShortConvolution, convolve_cached
from model_server.recurrence.cpp import CppShortConvolution
from model_server.recurrence.segments import Segments

CPU = torch.device("cpu")
CHANNELS = 20
needs_operators = pytest.mark.skipif(not usable(CPU, torch.float32), reason="no C++ operators")


@dataclass
class Scene:
    """Sequences of random inputs in blocks of a cache that is full of NaN, block 0 included."""

    width: int
    block_size: int
    lengths: Sequence[int]
    num_drafted: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    inputs: list[Tensor] = field(init=False)
    tables: list[list[int]] = field(init=False)
    done: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.weight, self.bias = noise(self.width, CHANNELS), noise(CHANNELS)
        self.inputs = [noise(length, CHANNELS).to(self.dtype) for length in self.lengths]
        counts = [-(-length // self.block_size) for length in self.lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.shape = KvShape(1, CHANNELS, 0, newest=kept_inputs(self.width, self.num_drafted))
        self.cache = KvCache((self.shape,), sum(counts) + 1, self.block_size, self.dtype, CPU)
        self.cache.rows[0].fill_(math.nan)
        self.done = [0] * len(self.lengths)

    def step(self, counts: Sequence[int], given: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The next counts[i] tokens of each sequence, or `given` in their positions; those with 0 take no part."""
        taking = [i for i, count in enumerate(counts) if count]
        spans = [(self.done[i], self.done[i] + counts[i]) for i in taking]
        inputs = [
            self.inputs[i][start:stop] if given is None else given[i]
            for i, (start, stop) in zip(taking, spans, strict=True)
        ]
        metadata = attention_metadata([self.tables[i] for i in taking], spans, self.block_size)
        found = self.convolve(torch.cat(inputs), metadata)
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]
        return list(found.split(list(counts)))

    def convolve(self, inputs: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert self.shape.newest is not None
        plan = Segments(metadata, self.block_size).convolution(self.width, self.shape.newest)
        return convolve_cached(inputs, self.weight, self.bias, self.cache.rows[0], plan)

    def convolve_rows(self, inputs: Tensor, start: int) -> Tensor:
        """The tokens of the first sequence from position `start` on, each a row with one token, then two of padding."""
        table, count = self.tables[0], len(inputs)
        positions = range(start, start + count)
        metadata = AttentionMetadata(
            slots=torch.tensor(
                [table[p // self.block_size] * self.block_size + p % self.block_size for p in positions] + [0, 0]
            ),
            block_tables=torch.tensor([table] * count + [[0] * len(table)] * 2, dtype=torch.int32),
            cu_seqlens_q=torch.arange(count + 3, dtype=torch.int32),
            kv_lengths=torch.tensor([*range(start + 1, start + count + 1), 1, 1], dtype=torch.int32),
            query_lengths_host=(1,) * (count + 2),
            kv_lengths_host=(*range(start + 1, start + count + 1), 1, 1),
        )
        return self.convolve(torch.cat((inputs, inputs.new_full((2, CHANNELS), math.nan))), metadata)[:count]

    def expected(self) -> list[Tensor]:
        """By definition, in the order in which sums are taken."""
        found = []
        for inputs in self.inputs:
            padded = torch.cat((inputs.new_zeros(self.width - 1, CHANNELS), inputs)).float()
            total = inputs * self.weight[-1]
            for lag in range(1, self.width):
                total = total + padded[self.width - 1 - lag : len(padded) - lag] * self.weight[-1 - lag]
            found.append(total + self.bias)
        return found


@dataclass
class OperatorScene(Scene):
    """The same by the C++ operator, with gates of 1; expected is what a step of whole sequences gives."""

    def convolve(self, inputs: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert self.shape.newest is not None
        segments = Segments(metadata, self.block_size)
        ones = torch.ones_like(inputs)
        plan = segments.convolution(self.width, self.shape.newest)
        operator = CppShortConvolution(self.weight, self.bias)
        return operator(torch.cat((ones, ones, inputs), 1), segments, plan, self.cache.rows[0])

    def expected(self) -> list[Tensor]:
        whole = OperatorScene(self.width, self.block_size, self.lengths, self.num_drafted, self.dtype, self.seed)
        found = whole.step(self.lengths)
        tolerance = 1e-5 if self.dtype is torch.float32 else 2e-2
        for part, exact in zip(found, super().expected(), strict=True):
            assert torch.allclose(part.float(), exact, rtol=tolerance, atol=tolerance)
        return found


SCENES = pytest.mark.parametrize("kind", [Scene, pytest.param(OperatorScene, marks=needs_operators)])


def random_scene(seed: int, kind: type[Scene]) -> tuple[random.Random, Scene]:
    chance = random.Random(seed)
    lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 4))]
    scene = kind(
        width=chance.randint(2, 6),
        block_size=chance.choice([1, 2, 4, 16]),
        lengths=lengths,
        num_drafted=chance.choice([0, 0, 1, 5]),
        dtype=chance.choice([torch.float32, torch.bfloat16]),
        seed=seed,
    )
    return chance, scene


@SCENES
@pytest.mark.parametrize("seed", range(40))
def test_any_cut_gives_the_bits_of_the_whole(seed: int, kind: type[Scene]) -> None:
    chance, scene = random_scene(seed, kind)
    parts: list[list[Tensor]] = [[] for _ in scene.lengths]
    while any(done < length for done, length in zip(scene.done, scene.lengths, strict=True)):
        left = [length - done for done, length in zip(scene.done, scene.lengths, strict=True)]
        most = chance.choice([1, 1, 3, 7, 40])
        counts = [chance.randint(0, min(most, rest)) for rest in left]
        if any(counts):
            for part, found in zip(parts, scene.step(counts), strict=True):
                part.append(found)
    for part, expected in zip(parts, scene.expected(), strict=True):
        assert torch.equal(torch.cat(part), expected)


@SCENES
@pytest.mark.parametrize("as_rows", [False, True], ids=["in a segment", "as rows of their own"])
@pytest.mark.parametrize("seed", range(20))
def test_drafts_that_were_wrong_leave_nothing(seed: int, as_rows: bool, kind: type[Scene]) -> None:
    """Every step computes a draft too, of which any number of tokens is right, beside rows of padding."""
    chance, scene = random_scene(1000 + seed, kind)
    scene = kind(scene.width, scene.block_size, [60], 5, scene.dtype, seed)
    expected = scene.expected()[0]
    scene.step([3])
    while scene.done[0] < 60:
        start = scene.done[0]
        length = min(chance.randint(1, 6), 60 - start)
        right = chance.randint(1, length)
        given = scene.inputs[0][start : start + length].clone()
        given[right:] = math.nan
        found = scene.convolve_rows(given, start) if as_rows else scene.step([length], [given])[0]
        assert torch.equal(found[:right], expected[start : start + right])
        scene.done = [start + right]


def test_a_plan_is_made_once_for_all_layers_alike() -> None:
    segments = Segments(attention_metadata([[1]], [(0, 3)], 4), 4)
    assert segments.convolution(3, 2) is segments.convolution(3, 2)
    assert segments.convolution(3, 2) is not segments.convolution(4, 3)


@needs_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_gates_inputs_and_sums_as_torch_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    projected = torch.randn(12, 3 * CHANNELS, generator=generator).to(dtype)
    scenes = [Scene(3, 4, [7, 5], dtype=dtype) for _ in range(2)]
    metadata = attention_metadata(scenes[0].tables, [(0, 7), (0, 5)], 4)
    found = []
    for scene, make in zip(scenes, (TorchShortConvolution, CppShortConvolution), strict=True):
        segments = Segments(metadata, 4)
        plan = segments.convolution(3, 2)
        found.append(make(scene.weight, scene.bias)(projected.clone(), segments, plan, scene.cache.rows[0]))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(found[1], found[0], rtol=tolerance, atol=tolerance)
    kept = [scene.cache.rows[0].view(-1, 2, CHANNELS)[1:] for scene in scenes]
    assert torch.allclose(*kept, equal_nan=True, rtol=0, atol=0)
