"""One cache object per request equals a full forward without a cache, type by type; requests come and go."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from parity.library import STATEFUL, load, make_case, run_whole
from parity.protocol import PagedBatch, assert_equal_logits
from support.tiny_types import type_checkpoint

from model_server.errors import RequestError
from model_server.models.hf.self_check import LENGTHS, alone, compare, run
from model_server.models.hf.stateful import StatefulRunner

# State spaces under both names, a hybrid, biases that no interface shows, an encoder-decoder, one without any cache.
REPRESENTATIVE = ("mamba", "rwkv", "jamba", "bloom", "fsmt", "openai-gpt")
# Their recurrences are summed in another order when many tokens are computed at once.
TOLERANCES = {"nemotron_h": 2e-3, "nemotron_h_omni": 2e-3}


def check(model_type: str, path: Path) -> None:
    case = make_case(model_type, path, eager=model_type != "falcon")
    runner = load(path)
    assert isinstance(runner, StatefulRunner)
    assert runner.traits.keeps_state
    assert runner.kv_shapes == ()
    assert_equal_logits(run_whole(runner, case.sequences), case.logits, TOLERANCES.get(model_type, 1e-4))


@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_type_equals_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parity
def test_a_window_longer_than_the_check_that_the_full_forward_does_not_know(tmp_path: Path) -> None:
    """Moshi's full forward attends to all tokens, its cache keeps those of the window."""
    model, cpu = type_checkpoint("moshi", tmp_path, sliding_window=max(LENGTHS) + 16), torch.device("cpu")
    runner = load(tmp_path)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(2, model.config.vocab_size, (n,), generator=generator) for n in (60, 50)]
    with torch.inference_mode():
        served = run(runner, sequences, torch.float32, cpu, prefilled=(45, 20))
        assert compare(served, [alone(model, one) for one in sequences], 1e-4, torch.float32).passed


@pytest.mark.parity
@pytest.mark.parametrize("model_type", [t for t in STATEFUL if t not in REPRESENTATIVE])
def test_every_type_equals_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


def test_a_state_goes_with_its_request(tmp_path: Path) -> None:
    case = make_case("mamba", tmp_path)
    batch = PagedBatch(load(tmp_path), case.sequences, block_size=4)
    batch.step([9, 5, 12])
    cache = weakref.ref(batch.states[1].kept.cache)
    assert cache() is not None
    del batch.states[1]
    gc.collect()
    assert cache() is None


def test_a_request_starts_anew_at_position_zero(tmp_path: Path) -> None:
    """As after a preemption: the same state object, the prompt from its beginning."""
    case = make_case("mamba", tmp_path)
    batch = PagedBatch(load(tmp_path), case.sequences[:1], block_size=4)
    batch.step([9])
    state = batch.states[0]
    batch.done = [0]
    first = batch.step([9])[0]
    batch.states[0] = state
    assert_equal_logits([first], [case.logits[0][:9]])


def test_a_step_that_does_not_continue_its_state_is_an_error(tmp_path: Path) -> None:
    case = make_case("mamba", tmp_path)
    batch = PagedBatch(load(tmp_path), case.sequences[:1], block_size=4)
    batch.step([5])
    batch.done = [7]
    with pytest.raises(RequestError, match="another length"):
        batch.step([1])


def test_the_state_bounds_what_a_block_costs(tmp_path: Path) -> None:
    """Fixed for a state space: layers * width * (states + convolution) numbers; one block's worth of tokens or more."""
    make_case("mamba", tmp_path)
    runner = load(tmp_path)
    assert isinstance(runner, StatefulRunner)
    config = runner.model.config
    numbers = config.num_hidden_layers * config.intermediate_size * (config.state_size + config.conv_kernel)
    assert runner.traits.state_bytes is not None
    assert numbers * 4 <= runner.traits.state_bytes <= numbers * 4 + 4096


def test_an_encoder_decoder_resumes_behind_its_prompt(tmp_path: Path) -> None:
    """Prompt and generated tokens in one forward give what step after step gives."""
    case = make_case("led", tmp_path)
    runner = load(tmp_path)
    batch = PagedBatch(runner, case.sequences[:1], block_size=4)
    inputs = batch.inputs([19])
    batch.states[0].prompt_length = 9
    with torch.inference_mode():
        logits = runner.forward(inputs, batch.cache)
    assert logits[:8].isnan().all()
    assert_equal_logits([logits[8:]], [case.logits[0]])
