"""Embeddings that come with the step instead of ids, and positions of three kinds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from parity.protocol import PagedBatch, prompts
from support.loading import load
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.models.decoder.decoder import Decoder
from model_server.runner.runner import ModelInputs


def forward(runner: Decoder, sequence: Tensor, **changes: object) -> Tensor:
    batch = PagedBatch(runner, [sequence], 4)
    inputs: ModelInputs = dataclasses.replace(batch.inputs((len(sequence),)), **changes)  # type: ignore[arg-type]
    with torch.inference_mode():
        return runner.forward(inputs, batch.cache)


def decoder(model_type: str, path: Path) -> tuple[Decoder, Tensor]:
    runner = load(tiny_checkpoint(model_type, path, with_tokenizer=False))
    assert isinstance(runner, Decoder)
    return runner, prompts(runner.vocab_size, (9,))[0]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_spans_of_the_tables_own_rows_change_nothing(model_type: str, tmp_path: Path) -> None:
    runner, ids = decoder(model_type, tmp_path)
    assert runner._embedding is not None
    plain = forward(runner, ids)
    embedding, zeros = runner._embedding, torch.zeros(9, dtype=torch.int64)
    rows = embedding._embedding(ids)
    if embedding._multiplier is not None:
        rows = rows * embedding._multiplier
    spans = ((1, rows[1:4]), (6, rows[6:]))
    blank = ids.clone()
    blank[1:4] = blank[6:] = 0
    assert torch.equal(forward(runner, blank, embeddings=spans), plain)
    assert not torch.equal(forward(runner, blank), plain)
    assert not torch.equal(forward(runner, ids, embeddings=((2, rows[:1]),)), plain)
    assert torch.equal(forward(runner, zeros, embeddings=((0, rows),)), plain)


def test_three_equal_rows_of_positions_are_one(tmp_path: Path) -> None:
    runner, ids = decoder("llama", tmp_path)
    positions = torch.arange(9)
    assert torch.equal(forward(runner, ids, positions=positions.expand(3, 9)), forward(runner, ids))
