"""Samples that the model writes itself: drawn from its own distribution, whatever it remembers of a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.protocol import PagedBatch
from support.loading import load
from support.tiny_models import tiny_checkpoint

from model_server.models.model import describe
from model_server.quantize import samples
from model_server.quantize.layers import LayerByLayer
from model_server.quantize.samples import written
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine
from model_server.weights.reader import SafetensorsReader


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        pytest.param("qwen3_next", marks=pytest.mark.long),  # states beside keys
        pytest.param("deepseek_v2", marks=pytest.mark.long),  # latents
    ],
)
def test_tokens_are_drawn_from_the_models_distribution(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "WRITTEN_LENGTH", 40)
    monkeypatch.setattr(samples, "_MOST_WRITTEN", 16)
    path = tiny_checkpoint(model_type, tmp_path / "model")
    checkpoint, tokenizer = examine(path), Tokenizer.load(path)
    spec = describe(checkpoint, name="m").spec
    assert spec is not None
    with SafetensorsReader(
        checkpoint.headers, dtype=torch.float32, device=torch.device("cpu"), base_prefix=spec.names.base
    ) as reader:
        found = written(LayerByLayer(spec, reader).whole(), tokenizer, 0, count=20, seed=7)
    ids = torch.cat([found.calibration, found.held_out])
    assert ids.shape == (22, 40)
    assert bool((ids[:, 0] == 0).all())
    ends = sorted(tokenizer.eos_token_ids)
    assert ends and not bool(torch.isin(ids, torch.tensor(ends)).any())
    # The same draws from the logits of whole prompts: parts of eleven rows, one number for each row and step.
    generator = torch.Generator().manual_seed(7)
    same = []
    for part in ids.split(11):
        torch.randint(0, tokenizer.vocab_size, (len(part),), generator=generator)
        draws = torch.cat([1 - torch.rand(len(part), 1, generator=generator) for _ in range(39)], dim=1)
        batch = PagedBatch(load(path), list(part), 16)
        for row, logits in enumerate(batch.step((40,) * len(part))):
            logits = logits.index_fill(1, torch.tensor(ends), -torch.inf)
            bounds = logits[:-1].softmax(dim=1).cumsum(dim=1)
            wanted = torch.searchsorted(bounds, draws[row, :, None] * bounds[:, -1:])[:, 0]
            same.append(wanted == part[row, 1:])
    assert float(torch.cat(same).float().mean()) > 0.98


def test_as_many_rows_at_once_as_there_is_memory_for(tmp_path: Path) -> None:
    checkpoint = examine(tiny_checkpoint("llama", tmp_path / "model"))
    spec = describe(checkpoint, name="m").spec
    assert spec is not None
    with SafetensorsReader(
        checkpoint.headers, dtype=torch.float32, device=torch.device("cpu"), base_prefix=spec.names.base
    ) as reader:
        writer = LayerByLayer(spec, reader).whole()
    row = 512 * 4 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, KV heads, numbers, bytes
    assert writer.rows_within(3 * row, 512) == writer.rows_within(4 * row - 1, 512) == 3
