"""Rotary frequencies against transformers' own functions, and the rotation against the half-split formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from model_server.errors import StartupError
from model_server.layers.rotary import Rope, Rotary, inverse_frequencies, rotate_
from model_server.weights.matrix import HeadOrder

CPU = torch.device("cpu")
FACTORS = {
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [1 + i / 4 for i in range(64)],
}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
     "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "truncate": False},
    {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 4.0, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 4096, "attention_factor": 1.3, **FACTORS},
]  # fmt: skip


@pytest.mark.parametrize("parameters", KINDS, ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_are_transformers(parameters: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072,
        rope_parameters={**parameters, "rope_theta": theta},
    )  # fmt: skip
    wanted, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU)
    rope = Rope(parameters["rope_type"], theta, 128, 131072, parameters)
    ours, our_scale = inverse_frequencies(rope)
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(scale)


def test_default_frequencies() -> None:
    frequencies, scale = inverse_frequencies(Rope("default", 100.0, 4, 16))
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
    assert scale == 1.0


def test_unknown_kind() -> None:
    with pytest.raises(
        StartupError,
        match="rope scaling 'ntk' is not served; served: default, linear, llama3, yarn, dynamic, proportional, ",
    ):
        inverse_frequencies(Rope("ntk", 1e4, 8, 16))


@pytest.mark.parametrize("factor", [None, 0, -1.0, "8", True, float("nan")])
def test_unusable_parameter(factor: Any) -> None:
    with pytest.raises(StartupError, match="rope scaling 'linear' needs a positive number `factor`"):
        inverse_frequencies(Rope("linear", 1e4, 8, 16, {"factor": factor}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_the_half_split_one_in_another_order(dtype: torch.dtype) -> None:
    """interleave, rotate pairs = rotate halves, interleave: so scores are equal."""
    dim, rope = 8, Rope("default", 10000.0, 8, 64)
    heads = torch.randn(5, 3, dim).to(dtype)
    positions = torch.tensor([0, 1, 7, 40, 63])
    angles = torch.outer(positions.double(), inverse_frequencies(rope)[0].double())
    cos, sin = (torch.cat((t, t), -1).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    x = heads.double()
    halves = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    wanted = HeadOrder(dim, dim).apply((x * cos + halves * sin).flatten(0, 1).flatten()).view(5, 3, dim)

    rows = HeadOrder(dim, dim).apply(heads.flatten()).view(5, 3, dim).clone()
    buffer = torch.cat((rows, torch.zeros(5, 1, dim, dtype=dtype)), 1)  # heads are a part of a wider matrix
    rotate_(buffer[:, :3], Rotary(rope, CPU).rotations(positions, 64).gathered)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(buffer[:, :3].double(), wanted, rtol=tolerance, atol=tolerance * 2)
    assert not buffer[:, 3].any()


def test_table_grows_and_keeps_its_values() -> None:
    rope = Rope("default", 10000.0, 16, 64)
    small, large = Rotary(rope, CPU), Rotary(rope, CPU)
    positions = torch.tensor([3, 63, 200])
    grown = small.rotations(positions, 201).gathered
    large.rotations(positions, 5000)
    assert grown.shape == (3, 1, 8)
    assert torch.equal(grown, large.rotations(positions, 201).gathered)


LONGROPE = {"original_max_position_embeddings": 8, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}


@pytest.mark.parametrize(("longest", "factors"), [(8, (1.0, 2.0)), (9, (3.0, 4.0))])
def test_longrope_goes_by_the_longest_sequence(longest: int, factors: tuple[float, float]) -> None:
    """At every position, also of shorter sequences, and of positions that come later."""
    rotary = Rotary(Rope("longrope", 100.0, 4, 16, LONGROPE), CPU)
    rotary.rotations(torch.tensor([3]), 4)
    rotary.set_longest(longest)
    scale = (1 + math.log(2) / math.log(8)) ** 0.5
    table = rotary.rotations(torch.tensor([1, 7, 20]), 21).gathered[:, 0]
    torch.testing.assert_close(table.abs(), torch.full((3, 2), scale))
    angles = torch.tensor([[at / factors[0], at * 0.1 / factors[1]] for at in (1.0, 7.0, 20.0)])
    torch.testing.assert_close(table / scale, torch.polar(torch.ones(3, 2), angles))


def test_without_a_limit_the_longest_seen_decides() -> None:
    rotary, other = (Rotary(Rope("longrope", 100.0, 4, 16, LONGROPE), CPU) for _ in range(2))
    other.set_longest(9)
    short = rotary.rotations(torch.tensor([1]), 9).gathered
    assert not torch.equal(short, other.rotations(torch.tensor([1]), 9).gathered)
    assert torch.equal(rotary.rotations(torch.tensor([1]), 10).gathered, other.rotations(torch.tensor([1]), 2).gathered)


def test_longrope_with_factors_of_its_own_on_either_side() -> None:
    rotary = Rotary(Rope("longrope", 100.0, 4, 16, {**LONGROPE, "short_mscale": 1.25, "long_mscale": 1.5}), CPU)
    for longest, length in ((8, 1.25), (9, 1.5)):
        rotary.set_longest(longest)
        assert torch.equal(rotary.rotations(torch.tensor([0, 7]), 8).gathered.real[0, 0], torch.full((2,), length))


def test_dynamic_goes_by_the_longest_sequence() -> None:
    rope = Rope("dynamic", 100.0, 8, 16, {"factor": 2.0})
    plain = Rope("default", 100.0, 8, 16)
    wider = Rope("default", 100.0 * 5 ** (8 / 6), 8, 16)
    for longest, same in ((0, plain), (16, plain), (48, wider)):
        torch.testing.assert_close(inverse_frequencies(rope, longest)[0], inverse_frequencies(same)[0])


@pytest.mark.parametrize("factors", [None, [1.0], [1.0, 0.0], [1.0, "2"], 2.0])
def test_unusable_factors(factors: Any) -> None:
    parameters = {"original_max_position_embeddings": 8, "short_factor": factors, "long_factor": [3.0, 4.0]}
    with pytest.raises(StartupError, match="needs 2 positive numbers in `short_factor`"):
        inverse_frequencies(Rope("longrope", 100.0, 4, 16, parameters))


def test_a_reserved_table_stays_where_it_is() -> None:
    rotary = Rotary(Rope("default", 100.0, 8, 64), CPU)
    rotary.reserve(300)
    positions = torch.tensor([299, 0])
    at = rotary.rotations(positions, 300).table.data_ptr()
    rotary.reserve(200)
    assert rotary.rotations(positions, 300).table.data_ptr() == at
    wide = Rotary(Rope("default", 100.0, 8, 300), CPU)
    assert torch.equal(rotary.rotations(positions, 300).gathered, wide.rotations(positions, 300).gathered)


def test_the_real_table_is_the_complex_one() -> None:
    rotations = Rotary(Rope("default", 100.0, 8, 64), CPU).rotations(torch.tensor([5, 9]), 10)
    assert rotations.real_table.data_ptr() == rotations.table.data_ptr()
    pairs = torch.view_as_complex(rotations.real_table[[5, 9]].view(2, 1, 4, 2))
    assert torch.equal(pairs, rotations.gathered)


def test_sections_follow_positions_of_their_own() -> None:
    """Pairs 0 and 1 by the first row, pair 2 by the second, 3 to 5 by the third."""
    rope = Rope("default", 10000.0, 12, 64, {"mrope_section": [2, 1, 3]})
    rotary, plain = Rotary(rope, CPU), Rotary(Rope("default", 10000.0, 12, 64), CPU)
    rows = torch.tensor([[0, 4, 9], [0, 5, 3], [0, 6, 7]])
    found = rotary.rotations(rows, 10)
    whole = [plain.rotations(row, 10).gathered[:, 0] for row in rows]
    expected = torch.cat([whole[0][:, :2], whole[1][:, 2:3], whole[2][:, 3:]], dim=1)
    assert torch.equal(found.gathered[:, 0], expected)
    assert torch.equal(found.table[found.positions], expected)
    same = rows[0].expand(3, 3)
    assert torch.equal(rotary.rotations(same, 10).gathered, plain.rotations(rows[0], 10).gathered)
    assert torch.equal(rotary.rotations(rows[0], 10).gathered, plain.rotations(rows[0], 10).gathered)
    assert torch.equal(plain.rotations(rows, 10).gathered, plain.rotations(rows[0], 10).gathered)


@pytest.mark.parametrize("sections", [[2, 4], [2, 2, 3], [7, -1, 0], "2 1 3", [2.0, 1, 3]])
def test_sections_must_be_three_counts_of_all_pairs(sections: object) -> None:
    with pytest.raises(StartupError, match="`mrope_section` must be three counts of 6 pairs"):
        Rotary(Rope("default", 10000.0, 12, 64, {"mrope_section": sections}), CPU)
