"""An engine whose drafts are computed, and what it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.engine_shard import EngineShard, generations_of
from support.loading import CPU, load
from support.meeting_ranks import on_ranks

from model_server.attention.choice import AttentionChoice
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.speculation.drafters.drafter import DraftedRunner, Drafter, DraftRow
from model_server.speculation.loading import find_speculator, load_drafter
from model_server.speculation.model_speculator import ModelSpeculator
from model_server.speculation.pace import Pace
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine

FREE, CHEAP = Pace([(1, 1.0)]), Pace([(1, 0.001)])
MOST = 4


def drafter_of(
    speculator: Path | str, base: Path, runner: Runner, tokenizer: Tokenizer, group: ProcessGroup | None = None
) -> Drafter:
    placement = Placement(CPU, torch.float32, Ranks.of(group or ProcessGroup()))
    return load_drafter(
        find_speculator(str(speculator), tokenizer, base), MOST, describe(examine(base)), runner, tokenizer.vocab_size,
        placement, AttentionChoice("reference", CPU),
    )  # fmt: skip


def shard_of(
    tokenizer: Tokenizer, base: Path, speculator: Path | str | None, group: ProcessGroup | None = None, *,
    budget: int = 1000, **options: Any,
) -> tuple[EngineShard, list[tuple[DraftRow, list[int], list[int]]]]:  # fmt: skip
    """And every draft that is made: the row, its tokens then, the draft."""
    runner: Any = load(base, group=group)
    rank = {} if group is None else {"rank": group.rank, "world_size": group.size}
    if speculator is None:
        return EngineShard(tokenizer, budget=budget, runner=runner, **rank, **options), []
    drafter = drafter_of(speculator, base, runner, tokenizer, group)
    whole: Any = DraftedRunner(runner, drafter)
    shard = EngineShard(tokenizer, budget=budget, runner=whole, **rank, **options)
    drafts = ModelSpeculator(MOST, drafter)
    drafts.pace, drafter.pace = FREE, CHEAP
    shard.engine.steps.speculator = drafts
    asked: list[tuple[DraftRow, list[int], list[int]]] = []
    drafted = drafter.draft

    def draft(rows: Any) -> list[list[int]]:
        found = drafted(rows)
        asked.extend((row, list(row.sequence.ids), ids) for row, ids in zip(rows, found, strict=True))
        return found

    drafter.draft = draft  # type: ignore[method-assign]
    return shard, asked


def ids_of(found: dict[int, list[Any]]) -> dict[int, list[int]]:
    return {key: [i for g in rows if g.tokens is not None for i in g.tokens.ids] for key, rows in found.items()}


def check_two_ranks(tokenizer: Tokenizer, base: Path, speculator: Path | str) -> None:
    """Two ranks draft, and say, what one does."""

    def work(group: ProcessGroup) -> tuple[dict[int, list[int]], list[list[int]]]:
        shard, asked = shard_of(tokenizer, base, speculator, group if group.size > 1 else None)
        results = [shard.prefill(0, *[shard.request([5 + i, 6, 7, 8], 12) for i in range(3)])]
        while results[-1].batch is not None:
            results.append(shard.decode(0))
        return ids_of(generations_of(*results)), [ids for _, _, ids in asked]

    alone, drafts = work(ProcessGroup())
    ranks = on_ranks(2, work)
    assert ranks[0][0] | ranks[1][0] == alone
    assert ranks[0][1] == ranks[1][1] == drafts
