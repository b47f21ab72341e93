"""Every native family against transformers, token by token, through the paged cache."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence

import pytest
import torch
from parity.cases import CASES, Case, Cases, Key, marked
from parity.protocol import CHUNKS, CPU, LENGTHS, STEPS, PagedBatch, assert_equal_logits, run_protocol
from safetensors.torch import load_file
from support.loading import load as load_path
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.attention.reference import ReferenceBackend
from model_server.cpp.config import SWITCH
from model_server.cpp.library import usable
from model_server.distributed.placement import Placement
from model_server.models.config import ModelConfig
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.models.families import FAMILIES, spec_of
from model_server.runner.runner import Kept
from model_server.weights.header import read_headers
from model_server.weights.reader import SafetensorsReader


def load(case: Case, dtype: torch.dtype = torch.float32) -> Decoder:
    runner = load_path(case.path, dtype=dtype)
    assert isinstance(runner, Decoder)
    return runner


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize("key", marked(CASES))
def test_family_equals_transformers(cases: Cases, key: Key) -> None:
    case = cases[key]
    runner = load(case)
    for block_size, steps in itertools.product((4, 16), (STEPS, CHUNKS)):
        assert_equal_logits(run_protocol(runner, case.sequences, block_size, steps=steps), case.logits)


@pytest.mark.parametrize("key", marked(CASES))
def test_family_equals_transformers_with_the_attention_of_a_cpu(cases: Cases, key: Key) -> None:
    """Where a compiler is: by the C++ operators."""
    case = cases[key]
    runner = load_path(case.path, backend=AttentionChoice(None, CPU).for_layers())
    for steps in (STEPS, CHUNKS):
        assert_equal_logits(run_protocol(runner, case.sequences, 16, steps=steps), case.logits)


@pytest.mark.skipif(not usable(CPU, torch.float32), reason="no C++ operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "key", marked([("lfm2", "plain"), ("qwen3_5_text", "plain"), ("bamba", "plain"), ("jamba", "dense")])
)
def test_layers_without_attention_have_the_same_bits_however_sequences_are_cut(
    cases: Cases, key: Key, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first layer with attention reads: of whole sequences, of chunks beside decode rows, token by token.

    Attention has other bits for chunks, and so have experts, which torch multiplies.
    """
    monkeypatch.setenv(SWITCH, "1")  # products in C++, too
    case = cases[key]
    runner = load(case, dtype)
    layer = next(i for i, shape in enumerate(runner.kv_shapes) if shape.row_width and shape.newest is None)
    assert layer > 0
    runner.keep_inputs([layer])
    whole = read_by_a_layer(runner, case, dtype, [LENGTHS])
    singles = [[int(step < length) for length in LENGTHS] for step in range(max(LENGTHS))]
    for steps in (STEPS, CHUNKS, singles):
        found = read_by_a_layer(runner, case, dtype, steps)
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def read_by_a_layer(runner: Decoder, case: Case, dtype: torch.dtype, steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """What the layer that keeps its inputs reads of each sequence, [length, hidden]."""
    batch = PagedBatch(runner, case.sequences, 16, dtype)
    found: list[list[Tensor]] = [[] for _ in case.sequences]
    for counts in steps:
        inputs = dataclasses.replace(batch.inputs(counts), kept=Kept())
        with torch.inference_mode():
            runner.forward(inputs, batch.cache)
        batch.done = [done + count for done, count in zip(batch.done, counts, strict=True)]
        assert inputs.kept is not None
        for parts, part in zip(found, inputs.kept.inputs[0].split(list(counts)), strict=True):
            parts.append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("key", marked([("llama", "plain"), ("gpt_neox", "plain"), ("opt", "post_norm")]))
def test_logit_rows_picks_rows_in_order(cases: Cases, key: Key) -> None:
    """In blocks of every kind: those tokens alone go on after the last attention."""
    case = cases[key]
    batch = PagedBatch(load(case), case.sequences, block_size=4)
    rows = torch.tensor([43, 0, 18, 19])
    with torch.inference_mode():
        logits = batch.runner.forward(batch.inputs([19, 11, 14], rows), batch.cache)
    flat = torch.cat(case.logits)
    assert logits.dtype == torch.float32
    assert_equal_logits([logits], [flat[rows]])


@pytest.mark.parametrize(
    "key",
    marked([("llama", "plain"), ("mistral", "plain"), ("gemma2", "plain"), ("falcon", "alibi"), ("mpt", "plain")]),
)
def test_bfloat16_is_close(cases: Cases, key: Key) -> None:
    case = cases[key]
    actual = run_protocol(load(case, torch.bfloat16), case.sequences, 4, torch.bfloat16)
    for got, want in zip(actual, case.logits, strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 5e-2


def test_a_normalised_head_divides_each_logit_by_the_length_of_its_row(cases: Cases) -> None:
    """Baichuan 2, known by a vocabulary too large for a tiny checkpoint."""
    case = cases["llama", "plain"]
    spec = dataclasses.replace(
        spec_of(ModelConfig(json.loads((case.path / "config.json").read_text()))), normalized_head=True
    )
    file = case.path / "model.safetensors"
    with SafetensorsReader(read_headers([file]), dtype=torch.float32, device=CPU) as reader:
        runner = build(spec, reader, Placement(CPU, torch.float32), ReferenceBackend())
    lengths = load_file(file)["lm_head.weight"].norm(dim=1)
    assert_equal_logits(run_protocol(runner, case.sequences, 4), [logits / lengths for logits in case.logits])


@pytest.mark.parametrize(
    "key", marked([("llama", "plain"), ("mixtral", "plain"), ("phimoe", "longrope"), ("deepseek_v3", "plain")])
)
def test_a_step_of_which_no_logits_are_wanted(cases: Cases, key: Key) -> None:
    """A chunk in the middle of a prompt: no token is left behind the last attention."""
    case = cases[key]
    batch = PagedBatch(load(case), case.sequences[:1], block_size=4)
    with torch.inference_mode():
        logits = batch.runner.forward(batch.inputs([7], torch.tensor([], dtype=torch.int64)), batch.cache)
    batch.done = [7]
    assert logits.shape == (0, batch.runner.vocab_size)
    assert_equal_logits(batch.step([12]), [case.logits[0][7:]])


@pytest.mark.parametrize(
    "key", marked([("mixtral", "plain"), ("gpt_oss", "plain"), ("deepseek_v2", "plain"), ("deepseek_v3", "plain")])
)
def test_bfloat16_with_experts_is_close_for_most_tokens(cases: Cases, key: Key) -> None:
    """A near tie between two experts may fall the other way."""
    case = cases[key]
    actual = run_protocol(load(case, torch.bfloat16), case.sequences, 4, torch.bfloat16)
    errors = [(got - want).abs().amax(-1) / want.abs().max() for got, want in zip(actual, case.logits, strict=True)]
    assert float((torch.cat(errors) < 5e-2).float().mean()) > 0.85


def test_neighbours_change_nothing_but_rounding(cases: Cases) -> None:
    """Alone or beside others, decode gives the same logits and tokens."""
    case = cases["llama", "plain"]
    runner = load(case)
    alone = []
    for sequence in case.sequences:
        batch = PagedBatch(runner, [sequence], block_size=16)
        parts = [batch.step([5])[0], *(batch.step([1])[0] for _ in range(len(sequence) - 5))]
        alone.append(torch.cat(parts))
    assert_equal_logits(run_protocol(runner, case.sequences, 16), alone, tolerance=1e-5)
