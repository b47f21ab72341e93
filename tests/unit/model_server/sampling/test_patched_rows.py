"""What a batch takes over from the one before it equals what would be laid out anew, whoever joins and leaves."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.graph_doubles import copying_staging
from torch import Tensor

from model_server.memory.transfer import Staging
from model_server.sampling import groups as layout
from model_server.sampling.categorical import weight_bits
from model_server.sampling.groups import RowGroups
from model_server.sampling.kernel_rows import KernelRows
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.row import SamplingRow

CPU = torch.device("cpu")
VOCAB = 23
COLUMNS = ("rows", "seeds", "counts", "temperature", "top_k", "dropped", "min_p")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("model_server.kernels.sampling.sampling")
    module.__dict__.update(SampledRows=SimpleNamespace, sample=None)
    monkeypatch.setitem(sys.modules, "model_server.kernels.sampling.sampling", module)
    monkeypatch.setattr(layout, "_GROWTH", 4)  # so that histories are often laid out again


def new_row(draw: random.Random) -> SamplingRow:
    parameters = SamplingParameters(
        temperature=draw.choice((1.0, 0.7)), top_k=draw.choice((0, 0, 5)), top_p=draw.choice((1.0, 0.8)),
        min_p=draw.choice((0.0, 0.1)), seed=draw.choice((0, 7, 2**64 - 1)), do_sample=draw.random() < 0.5,
        repetition_penalty=draw.choice((1.0, 1.3)), frequency_penalty=draw.choice((0.0, 0.5)),
        presence_penalty=draw.choice((0.0, 0.0, 0.4)),
    )  # fmt: skip
    prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
    return SamplingRow(
        parameters, num_prompt=len(prompt), max_new_tokens=draw.randint(1, 12), num_generated=0,
        history=torch.tensor(prompt) if parameters.penalises else None,
    )  # fmt: skip


def columns(rows: KernelRows | None) -> dict[str, Any]:
    if rows is None:
        return {}
    taken = rows._taken
    found = {name: getattr(taken, name).tolist() for name in COLUMNS}
    types = {name: getattr(taken, name).dtype for name in COLUMNS}
    return found | {"types": types, "greedy": taken.num_greedy, "unfiltered": taken.num_unfiltered}


def anew(rows: list[SamplingRow], histories: dict[SamplingRow, list[int]]) -> RowGroups:
    """Of copies, so that the rows keep their own state."""
    copies = [
        SamplingRow(
            row.parameters, row.num_prompt, row.max_new_tokens, num_generated=row.num_generated,
            history=None if row.history is None else torch.tensor(histories[row]),
        )
        for row in rows
    ]  # fmt: skip
    return RowGroups(copies, VOCAB, CPU, 8, kernels=True)


def penalised(made: RowGroups, logits: Tensor) -> Tensor:
    logits = logits.clone()
    if made.penalties is not None:
        made.penalties.apply(logits)
    return logits


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("staging", [Staging(CPU), copying_staging()], ids=["shared", "copied"])
def test_a_patched_layout_equals_a_new_one(seed: int, staging: Staging) -> None:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows: list[SamplingRow] = []
    histories: dict[SamplingRow, list[int]] = {}
    made: RowGroups | None = None
    for _ in range(25):
        rows = [row for row in rows if draw.random() < 0.85]
        joined = [new_row(draw) for _ in range(draw.choice((0, 0, 1, 3)) or (not rows))]
        histories |= {row: row.history.tolist() for row in joined if row.history is not None}
        rows += joined
        draw.shuffle(rows)
        changed = made is None or not made.serve(rows)
        if changed:
            made = RowGroups(rows, VOCAB, CPU, 8, kernels=True, staging=staging, previous=made)
        wanted = anew(rows, histories)
        assert made is not None
        if changed:
            assert columns(made.kernel_rows) == columns(wanted.kernel_rows)
        logits = torch.randn(len(rows), VOCAB, generator=generator)
        assert torch.equal(penalised(made, logits), penalised(wanted, logits))
        ids = torch.randint(VOCAB, (len(rows),), generator=generator)
        made.advance(ids)
        for row, token in zip(rows, ids.tolist(), strict=True):
            if row in histories:
                histories[row].append(token)
        rows = [row for row in rows if row.num_generated < row.max_new_tokens]


def test_only_new_rows_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from model_server.sampling import kernel_rows

    asked: list[SamplingParameters] = []
    record = kernel_rows._record
    monkeypatch.setattr(kernel_rows, "_record", lambda given, vocab: asked.append(given) or record(given, vocab))
    rows = [SamplingRow(SamplingParameters(seed=n, do_sample=True), 1, 9) for n in range(4)]
    bits = weight_bits(VOCAB)
    first = KernelRows(rows[:3], [0, 1, 2], VOCAB, bits, Staging(CPU))
    KernelRows([rows[2], rows[3], rows[0]], [0, 1, 2], VOCAB, bits, Staging(CPU), first)
    assert [given.seed for given in asked] == [0, 1, 2, 3]
