"""Engines whose drafts come from a drafter that computes, on a device that there is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.device_windows import FREE, NUM_BLOCKS
from support.drafted_shard import CHEAP, Asked, note_drafts
from support.drafts import use_drafts
from support.engine_shard import EngineShard
from support.graph_doubles import PlainGraphCapture, copying_staging
from support.loading import CPU, FixedAttention, load

from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend, ReferenceStep
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.device.speculator import BatchWindows
from model_server.features.drafts.drafters.drafter import DraftedRunner
from model_server.features.drafts.load import FoundSpeculator, find_speculator, load_drafter
from model_server.memory.kv_cache import KvCache
from model_server.models.model import describe
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine


class DeviceLengths(ReferenceBackend):
    """Believes the lengths on the device alone; the host's are only upper bounds."""

    capturable = True

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> ReferenceStep:
        lengths = tuple(metadata.kv_lengths.tolist())
        assert all(true <= said for true, said in zip(lengths, metadata.kv_lengths_host, strict=True))
        true = AttentionMetadata(
            slots=metadata.slots, block_tables=metadata.block_tables, cu_seqlens_q=metadata.cu_seqlens_q,
            kv_lengths=metadata.kv_lengths, query_lengths_host=metadata.query_lengths_host, kv_lengths_host=lengths,
        )  # fmt: skip
        return super().start(true, cache)


class DiceDrafts(DeviceModelSpeculator):
    """Windows of any length, another one in each step."""

    def __init__(self, most: int, dice: random.Random, drafter: Any, *, alone: bool = True) -> None:
        super().__init__(most, 128, CPU, 4, drafter, alone=alone)
        self.pace, self.dice = FREE, dice

    def length(self, windows: BatchWindows, rows: list[Sequence]) -> int:
        return self.dice.choice([0, self.most, self.dice.randint(0, self.most)])


def drafting_on_a_gpu(
    tokenizer: Tokenizer, base: Path, found: FoundSpeculator, most: int, seed: int = 0, *,
    group: ProcessGroup | None = None, budget: int = 1000,
    speculator: Callable[[Any], DeviceModelSpeculator] | None = None, **options: Any,
) -> tuple[EngineShard, list[Asked]]:  # fmt: skip
    """Replayed steps, uploads through buffers; and what is drafted on the device."""
    ranks = group or ProcessGroup()
    runner = load(base, group=group, backend=DeviceLengths())
    placement = Placement(CPU, torch.float32, Ranks.of(ranks))
    attention = FixedAttention(DeviceLengths())
    drafter = load_drafter(found, most, describe(examine(base)), runner, tokenizer.vocab_size, placement, attention)
    drafter.pace = CHEAP
    whole = DraftedRunner(runner, drafter)
    graphed: Any = GraphedRunner(whole, (16, 4, 1), PlainGraphCapture(), {3: (4, 1), 2: (4, 1)}, keeps=drafter.retains)
    rank = {} if group is None else {"rank": group.rank, "world_size": group.size}
    shard = EngineShard(tokenizer, budget=budget, grows=True, num_blocks=NUM_BLOCKS, runner=graphed, **rank, **options)
    graphed.capture(shard.engine.cache, 96, ranks)
    shard.engine.steps.staging = copying_staging()
    made = DiceDrafts(most, random.Random(seed), drafter, alone=ranks.size == 1)
    if speculator is not None:
        made = speculator(drafter)
    use_drafts(shard.engine, made)
    return shard, note_drafts(drafter)


def found_in(folder: Path | str, tokenizer: Tokenizer, base: Path) -> FoundSpeculator:
    return find_speculator(str(folder), tokenizer, base)
