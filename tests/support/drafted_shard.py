"""An engine whose drafts are computed, and what it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.drafts import use_drafts
from support.engine_shard import BLOCK, EngineShard, generations_of
from support.loading import CPU, load
from support.meeting_ranks import on_ranks
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.drafters.drafter import DraftedRunner, Drafter
from model_server.features.drafts.drafters.queries import RowsAt
from model_server.features.drafts.load import find_speculator, load_drafter
from model_server.features.drafts.pace import Pace
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine

FREE, CHEAP = Pace([(1, 1.0)]), Pace([(1, 0.001)])
MOST = 4


class Asked(NamedTuple):
    """Tokens of a row, those that its draft was to begin with, and what a drafter guessed behind them."""

    ids: list[int]
    forced: list[int]
    draft: list[int]


def noting(row_drafts: Any, asked: list[Asked]) -> Any:
    """The same drafts, noted as far as a step may check them."""
    draft = row_drafts.draft

    def noted(rows: RowsAt, length: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found, valid = draft(rows, length, forced)
        counts = torch.minimum(valid, rows.limit - rows.start - 1).tolist()
        for row, count in enumerate(counts):
            known = [] if forced is None else [one for one in forced[row].tolist() if one >= 0]
            if count > len(known):
                ids = rows.history[row, : int(rows.start[row]) + 1].tolist()
                asked.append(Asked(ids, known, found[row, len(known) : count].tolist()))
        return found, valid

    row_drafts.draft = noted
    return row_drafts


def note_drafts(drafter: Any) -> list[Asked]:
    """What it will draft."""
    asked: list[Asked] = []
    start = drafter.start
    drafter.start = lambda staging: noting(start(staging), asked)
    return asked


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
) -> tuple[EngineShard, list[Asked]]:  # fmt: skip
    """And every draft that is made."""
    runner: Any = load(base, group=group)
    rank = {} if group is None else {"rank": group.rank, "world_size": group.size}
    if speculator is None:
        return EngineShard(tokenizer, budget=budget, runner=runner, **rank, **options), []
    drafter = drafter_of(speculator, base, runner, tokenizer, group)
    whole: Any = DraftedRunner(runner, drafter)
    shard = EngineShard(tokenizer, budget=budget, runner=whole, **rank, **options)
    drafts = DeviceModelSpeculator(MOST, 128, CPU, BLOCK, drafter, alone=group is None)
    drafts.pace, drafter.pace = FREE, CHEAP
    use_drafts(shard.engine, drafts)
    return shard, note_drafts(drafter)


def ids_of(found: dict[int, list[Any]]) -> dict[int, list[int]]:
    return {key: [i for g in rows if g.tokens is not None for i in g.tokens.ids] for key, rows in found.items()}


def check_two_ranks(tokenizer: Tokenizer, base: Path, speculator: Path | str) -> None:
    """Two ranks draft, and say, what one does."""

    def work(group: ProcessGroup) -> tuple[dict[int, list[int]], list[list[int]]]:
        shard, asked = shard_of(tokenizer, base, speculator, group if group.size > 1 else None)
        results = [shard.prefill(0, *[shard.request([5 + i, 6, 7, 8], 12) for i in range(3)])]
        while results[-1].batch is not None:
            results.append(shard.decode(0))
        return ids_of(generations_of(*results)), [one.draft for one in asked]

    alone, drafts = work(ProcessGroup())
    ranks = on_ranks(2, work)
    assert ranks[0][0] | ranks[1][0] == alone
    assert ranks[0][1] == ranks[1][1] == drafts
