"""Which layers each stage of a pipeline holds."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.tiny_models import tiny_checkpoint

from model_server.errors import StartupError
from model_server.models.model import Model, describe
from model_server.models.stages import layer_counts, may_begin, split, stored_bytes
from model_server.weights.checkpoint import examine


def described(model_type: str, folder: Path) -> Model:
    return describe(examine(tiny_checkpoint(model_type, folder, with_tokenizer=False)))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (7, 7), (0, 30)])
def test_no_other_cut_has_a_smaller_largest_stage(num_stages: int, first: int, last: int) -> None:
    sizes = [5, 1, 9, 2, 2, 7, 3, 3]

    def largest(counts: tuple[int, ...]) -> int:
        ends = [0, *itertools.accumulate(counts)]
        runs = [sum(sizes[a:b]) for a, b in itertools.pairwise(ends)]
        runs[0] += first
        runs[-1] += last
        return max(runs)

    counts = split(sizes, num_stages, first=first, last=last)
    ways = (c for c in itertools.product(range(1, len(sizes) + 1), repeat=num_stages) if sum(c) == len(sizes))
    assert len(counts) == num_stages and min(counts) > 0 and sum(counts) == len(sizes)
    assert largest(counts) == min(largest(way) for way in ways)


@pytest.mark.parametrize("starts", [(0, 3, 4, 6), (0, 7), (0, 1, 2, 5)])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_begin_where_they_may(num_stages: int, starts: tuple[int, ...]) -> None:
    sizes = [5, 1, 9, 2, 2, 7, 3, 3]
    if num_stages > len(starts):
        pytest.skip("there are fewer places")
    ways = [(0, *others) for others in itertools.combinations(starts[1:], num_stages - 1)]
    runs = [[sum(sizes[a:b]) for a, b in itertools.pairwise([*way, len(sizes)])] for way in ways]
    counts = split(sizes, num_stages, starts=starts)
    found = [0, *itertools.accumulate(counts)]
    assert tuple(found[:-1]) in ways
    assert max(sum(sizes[a:b]) for a, b in itertools.pairwise(found)) == min(map(max, runs))


def test_no_stage_begins_with_a_layer_that_reads_what_another_keeps(tmp_path: Path) -> None:
    """What an indexer of a layer before it chose, or its keys."""
    kinds = ["full", "shared", "full", "shared", "shared", "shared"]
    folder = tiny_checkpoint(
        "glm_moe_dsa", tmp_path / "glm", variant="shared", with_tokenizer=False, num_hidden_layers=6,
        indexer_types=kinds, mlp_layer_types=["sparse"] * 6,
    )  # fmt: skip
    model = describe(examine(folder))
    assert layer_counts(model, 2) == (2, 4)
    with pytest.raises(StartupError, match="--num-stage 3: this model can be divided into 2 stages at most"):
        layer_counts(model, 3)
    gemma = describe(examine(tiny_checkpoint("gemma4_unified_text", tmp_path / "gemma", with_tokenizer=False)))
    assert gemma.spec is not None and any(owner is not None for owner in gemma.spec.kv_from)
    counts = layer_counts(gemma, 2)
    assert counts is not None
    assert all(gemma.spec.owner(index) >= counts[0] for index in range(counts[0], gemma.spec.num_layers))


def test_equal_layers_are_divided_equally_and_a_head_takes_the_place_of_layers() -> None:
    assert split([4] * 8, 2) == (4, 4)
    assert split([4] * 8, 2, last=8) == (5, 3)
    assert split([4] * 7, 2) == (4, 3)


@pytest.mark.parametrize(("model_type", "is_tied"), [("llama", False), ("gemma2", True), ("gpt2", True)])
def test_every_stored_byte_counts_and_a_tied_matrix_for_both_ends(
    model_type: str, is_tied: bool, tmp_path: Path
) -> None:
    model = described(model_type, tmp_path)
    assert model.spec is not None
    layers, first, last = stored_bytes(model, model.spec)
    tensors = {name: t for header in model.checkpoint.headers.values() for name, t in header.tensors.items()}
    total = sum(tensor.end - tensor.begin for tensor in tensors.values())
    embedding = next(t for name, t in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    twice = embedding.end - embedding.begin if is_tied else 0
    assert all(layers) and first and last
    assert sum(layers) + first + last == total + twice


def test_layers_that_read_the_keys_of_others_stay_with_them(tmp_path: Path) -> None:
    """A table of vectors for all layers is the first stage's."""
    assert split([4] * 8, 2, starts=range(4)) == (3, 5)
    assert split([4] * 8, 3, starts=(0, 1, 6, 7)) == (1, 5, 2)
    assert split([4] * 8, 4, starts=range(4)) == (1, 1, 1, 5)
    kinds = ["sliding_attention", "full_attention"] * 4
    folder = tiny_checkpoint("gemma4_text", tmp_path, with_tokenizer=False, num_hidden_layers=8, layer_types=kinds)
    model = describe(examine(folder))
    assert model.spec is not None
    assert [index for index in range(8) if may_begin(model.spec, index)] == [0, 1, 2, 3, 4]
    layers, first, last = stored_bytes(model, model.spec)
    assert first > last > 0 and layer_counts(model, 2) == split(layers, 2, first=first, last=last)
    with pytest.raises(StartupError, match="--num-stage 6: this model can be divided into 5 stages at most"):
        layer_counts(model, 6)


def test_asked_counts_are_taken_or_refused(tmp_path: Path) -> None:
    model = described("llama", tmp_path)
    assert model.spec is not None
    layers = model.spec.num_layers
    assert layer_counts(model, 1) is None
    assert layer_counts(model, 2, [1, layers - 1]) == (1, layers - 1)
    assert sum(layer_counts(model, 2) or ()) == layers
    for asked in ([layers], [0, layers], [1, layers], [1, 1, layers - 2]):
        with pytest.raises(StartupError, match=f"whose sum is the number of layers, {layers}"):
            layer_counts(model, 2, asked)
    with pytest.raises(StartupError, match="the model has only"):
        layer_counts(model, layers + 1)
    with pytest.raises(StartupError, match="--stage-layers needs --num-stage"):
        layer_counts(model, 1, [layers])


def test_a_model_of_the_transformers_runner_is_refused_by_name(tmp_path: Path) -> None:
    model = described("rwkv", tmp_path)
    assert model.spec is None
    with pytest.raises(StartupError, match="--num-stage 2: rwkv is served by the transformers runner"):
        layer_counts(model, 2)
