"""Gated delta nets in the decoder: cuts, rows that come and go, and what the rest of the server is told."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CPU, PagedBatch, assert_equal_logits, prompts
from support.engine_shard import EngineShard, tokens_of
from support.loading import load
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.errors import StartupError
from model_server.features.drafts.load import can_draft
from model_server.models.config import ModelConfig
from model_server.models.decoder.decoder import Decoder
from model_server.models.families import spec_of
from model_server.models.model import check_batch_invariance, describe
from model_server.recurrence.states import StatePool
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine

BLOCK = 16
LENGTHS = (97, 20, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("qwen3_5"), with_tokenizer=False)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Decoder:
    found = load(folder, backend=AttentionChoice(None, CPU).for_layers())
    assert isinstance(found, Decoder)
    return found


def states_of(runner: Decoder) -> StatePool:
    assert runner._states is not None
    return runner._states


def recurrent_layers(pool: StatePool) -> list[int]:
    return list(pool._layers)


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_in_any_company_gives_the_logits_of_the_sequence_alone(runner: Decoder, seed: int) -> None:
    chance, sequences = random.Random(seed), prompts(256, LENGTHS, seed)
    batch = PagedBatch(runner, sequences, BLOCK)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    while batch.done != list(LENGTHS):
        most = chance.choice([1, 1, 1, 5, 90])
        counts = [chance.randint(0, min(most, n - done)) for n, done in zip(LENGTHS, batch.done, strict=True)]
        if any(counts):
            for part, logits in zip(parts, batch.step(counts), strict=True):
                part.append(logits)
    whole = [PagedBatch(runner, [s], BLOCK).step([len(s)])[0] for s in sequences]
    assert_equal_logits([torch.cat(part) for part in parts], whole)


def test_a_state_that_is_not_a_number_stays_with_its_request(runner: Decoder) -> None:
    sequences = prompts(256, (9, 9))
    expected = PagedBatch(runner, sequences[:1], BLOCK).step([9])[0]
    batch = PagedBatch(runner, sequences, BLOCK)
    batch.step([8, 8])
    pool, slot = states_of(runner), batch.states[1].slot
    with torch.inference_mode():
        for index in recurrent_layers(pool):
            layer = pool.layer(index)
            layer.inputs[slot], layer.state[slot] = torch.nan, torch.nan
    first, second = batch.step([1, 1])
    assert_equal_logits([first], [expected[8:]])
    assert second.isnan().all()
    batch.done[1] = 0
    assert not batch.step([0, 9])[1].isnan().any()


def test_states_go_with_their_requests(folder: Path, tiny_tokenizer: Tokenizer) -> None:
    """Requests that end at different times, in slots that others had; each gets what it gets alone."""
    loaded: Any = load(folder)
    states_of(loaded).reserve(4)
    with torch.inference_mode():
        shard = EngineShard(tiny_tokenizer, budget=1000, runner=loaded)
        asked = [([*range(20 + i, 29 + 3 * i)], 4 + 5 * i) for i in range(4)]
        alone = []
        for prompt, count in asked:
            single = EngineShard(tiny_tokenizer, budget=1000, runner=loaded)
            alone.append(tokens_of(*single.run_out(single.prefill(0, single.request(prompt, count)), 0))[0])
        requests = [shard.request(*one, state_slot=3 - i) for i, one in enumerate(asked)]
        first = shard.prefill(0, *requests[:2])
        steps = [first, shard.decode(0)]
        steps.append(shard.prefill(1, *requests[2:], cached=0))
        together = tokens_of(*steps, *shard.run_out(steps[-1], 0)[1:])
    assert [together[i] for i in range(4)] == alone


def test_a_request_without_its_state_is_refused(folder: Path, tiny_tokenizer: Tokenizer) -> None:
    loaded: Any = load(folder)
    states_of(loaded).reserve(4)
    with torch.inference_mode():
        shard = EngineShard(tiny_tokenizer, budget=1000, runner=loaded)
        wrong = [
            {"state_slot": 4}, {"state_slot": 1, "state_from": 9, "cache_len": 4}, {"state_saves": ((4, 5),)},
            {"state_slot": 1, "cache_len": 4},
        ]  # fmt: skip
        result = shard.prefill(0, *(shard.request([*range(20, 29)], 4, **one) for one in wrong))
    found = {one.request_id: one.error or "" for one in result.generations}
    assert [found[i].split(": ", 1)[1] for i in range(4)] == [
        *["a state is outside the 4 slots"] * 3,
        "cache_len is 4, but state_from names no state to continue from",
    ]


def test_what_the_server_is_told(runner: Decoder, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    traits = runner.traits
    assert traits.recurrent_bytes == 3 * (8 * 16 * 24 * 4 + (2 * 4 * 16 + 8 * 24) * 3 * 4)
    assert not traits.keeps_state and not traits.continues_from_blocks
    assert not traits.capturable and not traits.in_pieces
    assert not can_draft(traits, None, 4, None)
    assert "cannot go back behind a wrong draft" in caplog.text
    with pytest.raises(StartupError, match="gated delta nets multiply in a form that depends on the number of rows"):
        check_batch_invariance(describe(examine(folder)), CPU, torch.float32, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"linear_num_key_heads": 3},
            r"`linear_num_value_heads` \(8\) is not a multiple of `linear_num_key_heads` \(3\)",
        ),
        ({"linear_conv_kernel_dim": 1}, "`linear_conv_kernel_dim` must be at least 2"),
        ({"layer_types": ["linear_attention"] * 4}, "`layer_types` names no layer with attention"),
        ({"hidden_act": "gelu"}, "`hidden_act` is served for qwen3_5_text as 'silu' only"),
    ],
)
def test_configs_that_are_refused(folder: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec_of(ModelConfig({**examine(folder).fields, **fields}))
