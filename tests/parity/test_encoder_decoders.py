"""Encoder-decoders in batches over the paged cache equal transformers, type by type; requests come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.library import TRANSLATING, LibraryCase, load, make_case, run_whole
from parity.protocol import PagedBatch, assert_equal_logits
from support.loading import load as load_as_shard

from model_server.attention.choice import AttentionChoice
from model_server.errors import RequestError, StartupError
from model_server.models.hf.encoder_decoder import EncoderDecoderRunner
from model_server.models.hf.quantized import QuantizedLinear
from model_server.models.hf.self_check import compare, translated
from model_server.models.hf.stateful import decoder_prefix

# Biases by distance; learned positions.
REPRESENTATIVE = ("t5", "bart")
CPU = torch.device("cpu")


def check(model_type: str, path: Path) -> None:
    case = make_case(model_type, path)
    runner = load(path)
    assert isinstance(runner, EncoderDecoderRunner)
    assert not runner.traits.keeps_state
    assert_equal_logits(run_whole(runner, case.sequences), case.logits)
    assert_equal_logits(run_whole(runner, case.sequences, block_size=16), case.logits)


@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_type_equals_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("model_type", [t for t in TRANSLATING if t not in REPRESENTATIVE])
def test_every_type_equals_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.fixture(params=REPRESENTATIVE)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> LibraryCase:
    return make_case(request.param, tmp_path)


def test_what_was_generated_before_a_preemption_is_computed_with_the_prompt(case: LibraryCase) -> None:
    """Prompt and generated tokens in one forward, beside a request that goes on, give what step after step gives."""
    batch = PagedBatch(load(case.path), case.sequences[:2], block_size=4)
    batch.step([0, 5])
    inputs = batch.inputs([19, 1])
    batch.states[0].prompt_length = 9
    with torch.inference_mode():
        resumed, other = batch.runner.forward(inputs, batch.cache).split([19, 1])
    assert resumed[:8].isnan().all()
    assert_equal_logits([resumed[8:], other], [case.logits[0], case.logits[1][1:2]])


def test_an_answer_longer_than_any_distance_with_a_bias_of_its_own(tmp_path: Path) -> None:
    case = make_case("t5", tmp_path, relative_attention_max_distance=6, relative_attention_num_buckets=4)
    assert_equal_logits(run_whole(load(tmp_path), case.sequences), case.logits)


def test_only_wanted_rows_have_logits(case: LibraryCase) -> None:
    batch = PagedBatch(load(case.path), case.sequences, block_size=4)
    with torch.inference_mode():
        logits = batch.runner.forward(batch.inputs([9, 5, 12], torch.tensor([8, 10, 13, 25])), batch.cache)
    assert logits[1].isnan().all()  # of a prompt's token but the last
    assert_equal_logits([logits[[0, 2, 3]]], [torch.stack([one[0] for one in case.logits])])


def test_a_prompt_of_one_token(case: LibraryCase) -> None:
    batch = PagedBatch(load(case.path), case.sequences, block_size=4)
    runner = batch.runner
    assert isinstance(runner, EncoderDecoderRunner)
    (first, *_), (second, *_) = batch.step([1, 0, 0]), batch.step([1, 0, 0])
    prompt, generated = case.sequences[0][:1], case.sequences[0][1:2]
    start = torch.tensor(runner.traits.decoder_prefix)
    with torch.inference_mode():
        decoded = torch.cat([start, generated])[None]
        expected = runner.model(input_ids=prompt[None], decoder_input_ids=decoded, use_cache=False).logits[0]
    assert compare([torch.cat([first, second])], [expected[-2:]], 1e-4, torch.float32).passed


def test_a_part_of_a_prompt_is_an_error(case: LibraryCase) -> None:
    batch = PagedBatch(load(case.path), case.sequences[:1], block_size=4)
    inputs = batch.inputs([5])
    batch.states[0].prompt_length = 9
    with torch.inference_mode(), pytest.raises(RequestError, match="as a whole"):
        batch.runner.forward(inputs, batch.cache)


def test_the_model_is_given_back(tmp_path: Path) -> None:
    """What this runner changed is undone: the model then is transformers' own for another."""
    make_case("bart", tmp_path)
    runner = load(tmp_path)
    assert isinstance(runner, EncoderDecoderRunner)
    changed = type(runner.model.get_decoder().embed_positions).__name__
    runner.give_back()
    assert type(runner.model.get_decoder().embed_positions).__name__ == "BartLearnedPositionalEmbedding" != changed


@pytest.mark.parametrize("method", ["eetq", pytest.param("bitsandbytes-nf4", marks=pytest.mark.parity)])
def test_weights_are_quantized_on_load(case: LibraryCase, method: str) -> None:
    """The check compares with transformers on the same matrices; here the batch is what each request is alone."""
    runner = load_as_shard(case.path, quantize=method)
    assert isinstance(runner, EncoderDecoderRunner)
    assert any(isinstance(one, QuantizedLinear) for one in runner.model.get_decoder().modules())
    together = run_whole(runner, case.sequences)
    with torch.inference_mode():
        prefix = decoder_prefix(runner.model)
        alone = [
            translated(runner.model, s[:n], prefix, s[n:]) for s, n in zip(case.sequences, (9, 5, 12), strict=True)
        ]
    assert_equal_logits(together, alone)


def test_adapters_are_refused(case: LibraryCase) -> None:
    with pytest.raises(StartupError, match="merge the adapter"):
        load_as_shard(case.path, adapters={"some": case.path})


def test_the_best_backend_serves_it(tmp_path: Path) -> None:
    """With the C++ operators, where they are, in place of the reference."""
    case = make_case("bart", tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, EncoderDecoderRunner)
    loaded.give_back()
    with torch.inference_mode():
        runner = EncoderDecoderRunner(loaded.model, AttentionChoice(None, CPU), CPU, loaded.max_positions, ())
    assert_equal_logits(run_whole(runner, case.sequences), case.logits)
