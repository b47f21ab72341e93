"""LFM2's layers with short convolutions in the decoder: cuts, company, and what is kept of them in the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CPU, PagedBatch, prompts
from support.drafts import use_drafts
from support.engine_shard import EngineShard, tokens_of
from support.loading import load
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.batch.sequence import Sequence as Row
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.speculator import Draft, Drafting, Speculator
from model_server.models.config import ModelConfig
from model_server.models.decoder.decoder import Decoder
from model_server.models.families import pooled_spec_of, spec_of
from model_server.models.families.base import UnknownFamilyError
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine

BLOCK = 16
LENGTHS = (37, 20, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("lfm2", tmp_path_factory.mktemp("lfm2"), with_tokenizer=False)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    """In bfloat16, whose products and attention have the same bits in every step; in float32 they are rounded."""
    found = load(folder, dtype=torch.bfloat16, backend=AttentionChoice(None, CPU, torch.bfloat16).for_layers())
    assert isinstance(found, Decoder)
    return found


def alone(runner: Runner, sequence: Tensor) -> Tensor:
    """The logits of a sequence in one forward."""
    return PagedBatch(runner, [sequence], BLOCK, torch.bfloat16).step([len(sequence)])[0]


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_in_any_company_gives_the_bits_of_the_sequence_alone(runner: Runner, seed: int) -> None:
    chance, sequences = random.Random(seed), prompts(256, LENGTHS, seed)
    batch = PagedBatch(runner, sequences, BLOCK, torch.bfloat16)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    while batch.done != list(LENGTHS):
        most = chance.choice([1, 1, 1, 5, 24])
        counts = [chance.randint(0, min(most, n - done)) for n, done in zip(LENGTHS, batch.done, strict=True)]
        if any(counts):
            for part, logits in zip(parts, batch.step(counts, prompts=range(3)), strict=True):
                part.append(logits)
    for part, sequence in zip(parts, sequences, strict=True):
        assert torch.equal(torch.cat(part), alone(runner, sequence))


def test_a_sequence_that_goes_on_from_shared_blocks_has_the_same_bits(runner: Runner) -> None:
    """Its first blocks are another's."""
    first, second = prompts(256, (50, 50))
    second[:32] = first[:32]
    batch = PagedBatch(runner, [first, second], BLOCK, torch.bfloat16)
    batch.step([50, 0])
    batch.tables[1][:2] = batch.tables[0][:2]
    batch.done[1] = 32
    assert torch.equal(batch.step([0, 18])[1], alone(runner, second)[32:])


def test_the_cache_has_a_few_rows_of_each_block(folder: Path) -> None:
    placement = Placement(CPU, torch.bfloat16, num_drafted=3)
    runner = load_runner(describe(examine(folder)), placement, AttentionChoice("reference", CPU))
    assert [shape.newest for shape in runner.kv_shapes] == [6, 6, None, 6]
    assert runner.kv_shapes[0].block_bytes(BLOCK, torch.float8_e4m3fn) == 6 * 64 * 2
    traits = runner.traits
    assert not traits.keeps_state and not traits.in_pieces


class Guesses(Speculator):
    """Drafts of what is known to follow, with wrong tokens among them."""

    def __init__(self, follows: Sequence[int], most: int, seed: int) -> None:
        super().__init__(most)
        self.pace, self.follows, self.chance, self.lengths = Pace([(1, 1.0)]), follows, random.Random(seed), [0]

    def _draft(self, sequence: Row, drafting: Drafting) -> Draft:
        first = len(sequence.ids)
        ids = self.follows[first : first + self.chance.randint(0, self.longest(sequence))]
        self.lengths.append(len(ids))
        return Draft([i if self.chance.random() < 0.7 else (i + 1) % 512 for i in ids])


@pytest.mark.parametrize("seed", range(4))
def test_drafts_change_no_token(folder: Path, tiny_tokenizer: Tokenizer, seed: int) -> None:
    prompt, most = [*range(20, 35)], 5
    placement = Placement(CPU, torch.float32, num_drafted=most)
    runner: Any = load_runner(describe(examine(folder)), placement, AttentionChoice("reference", CPU))
    with torch.inference_mode():
        plain, drafted = (EngineShard(tiny_tokenizer, budget=1000, runner=runner) for _ in range(2))
        ids = tokens_of(*plain.run_out(plain.prefill(0, plain.request(prompt, 60)), 0))[0]
        speculator = Guesses(prompt + ids, most, seed)
        use_drafts(drafted.engine, speculator)
        steps = drafted.run_out(drafted.prefill(0, drafted.request(prompt, 60)), 0)
    assert tokens_of(*steps)[0] == ids
    assert max(speculator.lengths) == most and len(steps) < 60


@pytest.mark.parametrize(
    ("fields", "size", "kinds"),
    [
        ({"block_multiple_of": 16}, 64, "ccac"),
        ({"block_multiple_of": 10}, 70, "ccac"),
        ({"block_ffn_dim_multiplier": 1.5}, 256, "ccac"),
        ({"block_ffn_dim_multiplier": None}, 64, "ccac"),
        ({"block_auto_adjust_ff_dim": False}, 96, "ccac"),
        ({"block_ff_dim": 150, "block_multiple_of": 1}, 100, "ccac"),
        ({"layer_types": None, "full_attn_idxs": [0, 3], "block_multiple_of": 16}, 64, "acca"),
        ({"layer_types": None, "block_multiple_of": 16}, 64, "aaaa"),
    ],
)
def test_configs(fields: dict[str, object], size: int, kinds: str) -> None:
    spec = spec_of(config(**fields))
    assert spec.intermediate_size == size
    assert "".join("a" if spec.mixer(index) is None else "c" for index in range(4)) == kinds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["conv"] * 4}, "`layer_types` names no layer with attention"),
        ({"layer_types": ["conv", "mamba"] * 2}, "`layer_types` must name 4 times one of conv, full_attention"),
        ({"conv_L_cache": 1}, "`conv_L_cache` must be at least 2, got 1"),
        ({"full_attn_idxs": "all", "layer_types": None}, "`full_attn_idxs` must be a list of layer numbers"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec_of(config(**fields))


def test_a_model_that_reads_both_ways_is_none_of_ours() -> None:
    with pytest.raises(UnknownFamilyError, match="in one direction only"):
        pooled_spec_of(config(is_causal=False), ())


def test_a_convolution_of_another_width_than_the_config_says(folder: Path) -> None:
    checkpoint = examine(folder)
    checkpoint.fields["conv_L_cache"] = 4  # type: ignore[index]
    with pytest.raises(StartupError, match=r"layers.0.conv.conv.weight has shape \[64, 1, 3\]; the config asks for"):
        load_runner(describe(checkpoint), Placement(CPU, torch.float32), AttentionChoice("reference", CPU))


def config(**fields: object) -> ModelConfig:
    plain = {
        "model_type": "lfm2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }  # fmt: skip
    return ModelConfig(plain | fields)
