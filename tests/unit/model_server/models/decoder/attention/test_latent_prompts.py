"""A model with latent attention: prompts, in chunks or whole, give the logits of one token at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.protocol import PagedBatch, assert_equal_logits, prompts
from support.loading import load
from support.tiny_models import tiny_checkpoint

from model_server.attention.latent import is_expanded
from model_server.models.decoder.attention.mla import LatentAttention
from model_server.models.decoder.decoder import Decoder

LENGTH = 120


@pytest.mark.parametrize(
    ("model_type", "has_operators"), [("deepseek_v2", False), ("deepseek_v3", False), ("deepseek_v3", True)]
)
def test_prompts_equal_single_tokens(
    model_type: str, has_operators: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the C++ operators the last chunk is so long that the keys of its prefix are made from the latents too."""
    if not has_operators:
        monkeypatch.setattr("model_server.models.decoder.attention.mla.usable", lambda device, dtype: False)
    path = tmp_path / "model"
    tiny_checkpoint(model_type, path)
    runner = load(path)
    sequences = prompts(runner.vocab_size, (LENGTH, 5))
    single = PagedBatch(runner, sequences, 16)
    expected = torch.cat([single.step((1, 0))[0] for _ in range(LENGTH)])
    whole = PagedBatch(runner, sequences, 16).step((LENGTH, 0))[0]
    batch = PagedBatch(runner, sequences, 16)
    chunks = torch.cat([batch.step(counts)[0] for counts in ((40, 0), (10, 3), (LENGTH - 50, 1))])
    assert_equal_logits([whole, chunks], [expected, expected])
    assert isinstance(runner, Decoder)
    attention = runner._blocks[0].attention
    assert isinstance(attention, LatentAttention)
    assert is_expanded(attention.layer, LENGTH - 50, LENGTH) != (attention.layer.heads.panels is not None)
    assert not is_expanded(attention.layer, 10, 50)
