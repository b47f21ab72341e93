"""A decoder cut into stages: what one hands to the next is enough, to the last bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CPU, STEPS, PagedBatch, prompts
from support.loading import FixedAttention
from support.tiny_models import tiny_checkpoint

from model_server.attention.choice import AttentionChoice
from model_server.attention.reference import ReferenceBackend
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Axis, Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.load import load_runner
from model_server.models.model import Model, describe
from model_server.runner.runner import Runner
from model_server.weights.checkpoint import examine

# Blocks of every kind: sequential, with post norms, parallel, latent attention, experts, learned positions, tied heads,
# convolutions, states, vectors of the tokens.
FAMILIES = [
    "llama",
    "gemma2",
    "cohere",
    "deepseek_v2",
    "mixtral",
    "gpt2",
    "granite",
    "lfm2",
    "qwen3_next",
    "bamba",
    "kimi_linear",
    "olmo_hybrid",
    "minimax",
    "jamba",
    "falcon_mamba",
    "deepseek_v32",
    "gemma4_text",
]
# So that no layer reads keys of another stage.
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
}


def stage_of(
    model: Model, rank: int, count: int, attention: AttentionChoice, dtype: torch.dtype = torch.float32
) -> Runner:
    ranks = Ranks(Layout(stage=Axis(rank, count)), ProcessGroup(), ProcessGroup())
    return load_runner(model, Placement(CPU, dtype, ranks), attention)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("native", [False, True], ids=["reference", "best"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_stages_give_the_whole_models_logits(
    model_type: str, native: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    overrides = OVERRIDES.get(model_type, {})
    model = describe(examine(tiny_checkpoint(model_type, tmp_path, with_tokenizer=False, **overrides)))
    attention = AttentionChoice(None, CPU, dtype) if native else FixedAttention(ReferenceBackend())
    whole, first, second = (
        stage_of(model, 0, 1, attention, dtype),
        stage_of(model, 0, 2, attention, dtype),
        stage_of(model, 1, 2, attention, dtype),
    )
    assert first.kv_shapes + second.kv_shapes == whole.kv_shapes and first.kv_shapes and second.kv_shapes
    sequences = prompts(whole.vocab_size)
    batches = [PagedBatch(runner, sequences, 4, dtype) for runner in (whole, first, second)]
    for counts in STEPS:
        rows = torch.tensor([sum(counts) - 1])
        ours, front, back = (batch.inputs(counts, rows) for batch in batches)
        with torch.inference_mode():
            expected = whole.forward(ours, batches[0].cache)
            hidden = first.forward(front, batches[1].cache)
            logits = second.forward(dataclasses.replace(back, hidden=hidden), batches[2].cache)
        stream = first.traits.passed_on
        assert stream is not None and stream == second.traits.received
        assert hidden.shape == (sum(counts), stream.width) and hidden.dtype == stream.dtype
        assert torch.equal(logits, expected)
        for batch in batches:
            batch.done = [done + count for done, count in zip(batch.done, counts, strict=True)]


def test_a_stage_holds_no_more_than_its_own(tmp_path: Path) -> None:
    model = describe(examine(tiny_checkpoint("llama", tmp_path, with_tokenizer=False)))
    attention = FixedAttention(ReferenceBackend())
    parts = [stage_of(model, rank, 2, attention).traits.weight_bytes for rank in range(2)]
    whole = stage_of(model, 0, 1, attention).traits.weight_bytes
    assert None not in parts and sum(size for size in parts if size) == whole


def test_layers_that_read_what_another_stage_has(tmp_path: Path) -> None:
    """Keys of a layer before a cut; what its indexer chose."""
    attention = FixedAttention(ReferenceBackend())
    model = describe(examine(tiny_checkpoint("gemma4_unified_text", tmp_path / "keys", with_tokenizer=False)))
    stage_of(model, 1, 2, attention)
    with pytest.raises(StartupError, match="layer 3 of this model reads the keys of layer 2, which another stage has"):
        stage_of(model, 3, 4, attention)
    folder = tiny_checkpoint("glm_moe_dsa", tmp_path / "indexers", variant="shared", with_tokenizer=False)
    model = describe(examine(folder))
    stage_of(model, 1, 2, attention)
    with pytest.raises(StartupError, match="layer 1 of this model reads keys that a layer before it chose"):
        stage_of(model, 1, 4, attention)
