"""From config.json to a Spec: transformers' defaults, both spellings of rope, one line for what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from model_server.errors import StartupError
from model_server.layers.rotary import inverse_frequencies
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Spec
from model_server.models.families import FAMILIES, spec_of
from model_server.models.families.vision import TEXT_TYPES
from model_server.models.model import with_linear_rope
from model_server.weights.checkpoint import examine
from wire.model_files import read_object

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def spec(model_type: str = "llama", **fields: Any) -> Spec:
    return spec_of(ModelConfig({"model_type": model_type, **SIZES, "num_key_value_heads": None, **fields}))


def test_defaults_of_a_bare_llama() -> None:
    bare = spec()
    assert (bare.num_kv_heads, bare.head_dim, bare.scale) == (4, 16, 0.25)
    assert (bare.norm_eps, bare.activation, bare.max_positions, bare.tied_head) == (1e-6, "silu", 2048, False)
    assert bare.ropes[0] is not None
    assert bare.windows == (None,) * 4
    assert (bare.ropes[0].kind, bare.ropes[0].theta, bare.ropes[0].dim, bare.ropes[0].max_positions) == (
        "default",
        10000.0,
        16,
        2048,
    )


@pytest.mark.parametrize(("model_type", "positions"), [("mistral", 131072), ("qwen2", 32768), ("qwen3", 32768)])
def test_default_positions(model_type: str, positions: int) -> None:
    assert spec(model_type).max_positions == positions


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_rope_old_and_new(fields: dict[str, Any]) -> None:
    rope = spec(**fields).ropes[3]
    assert rope is not None
    assert (rope.kind, rope.theta, rope.number("factor")) == ("linear", 5e5, 2.0)


def test_a_scaling_that_is_added_to_a_newer_file_is_the_one_that_counts() -> None:
    newer = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rope = spec(rope_parameters=newer, rope_scaling=yarn, rope_theta=5e5).ropes[0]
    assert rope is not None and (rope.kind, rope.theta) == ("yarn", 5e5)


def test_an_original_length_outside_of_the_block_counts_first() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rope = spec(rope_parameters=yarn, original_max_position_embeddings=64).ropes[0]
    assert rope is not None and rope.parameters["original_max_position_embeddings"] == 64


def test_heads_that_rotate_as_a_whole() -> None:
    for fields in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(StartupError, match="heads of llama rotate as a whole"):
            spec(**fields)
    assert spec(partial_rotary_factor=1.0) == spec()


def test_rope_scaling_null() -> None:
    (rope,) = {r.theta for r in spec(rope_scaling=None, rope_theta=1e6).ropes if r}
    assert rope == 1e6


def test_mistral_windows() -> None:
    assert spec("mistral").windows == (4096,) * 4
    assert spec("mistral", sliding_window=None).windows == (None,) * 4
    assert spec("mistral", sliding_window=8).windows == (8,) * 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type: str) -> None:
    assert spec(model_type, sliding_window=8).windows == (None,) * 4
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert spec(model_type, **on, max_window_layers=3).windows == (None, None, None, 8)
    assert spec(model_type, **on, max_window_layers=0).windows == (8,) * 4
    assert spec(model_type, **on).windows == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert spec(model_type, **on, layer_types=types).windows == (8, None, 8, None)
    for wrong in (["full_attention"], ["full_attention"] * 3 + ["chunked_attention"], "full_attention"):
        with pytest.raises(StartupError, match="`layer_types` must name 4 times one of"):
            spec(model_type, **on, layer_types=wrong)


def test_qwen3_heads_are_128_wide() -> None:
    assert spec("qwen3").head_dim == 128
    assert [r.dim for r in spec("qwen3").ropes if r] == [128] * 4
    assert spec("qwen3", head_dim=32).scale == pytest.approx(32**-0.5)


def test_unknown_type_names_the_served_ones() -> None:
    with pytest.raises(StartupError) as caught:
        spec("rwkv")
    assert (
        str(caught.value)
        == f"Unsupported model type rwkv; this version serves {', '.join(sorted({*FAMILIES, *TEXT_TYPES}))}"
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "`hidden_size` must be a positive integer, got None"),
    ({"hidden_size": -64}, "`hidden_size` must be a positive integer, got -64"),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` must be a positive integer, got 0"),
    ({"vocab_size": 2**40}, "`vocab_size` must be a positive integer"),
    ({"vocab_size": "100"}, "`vocab_size` must be a positive integer, got '100'"),
    ({"num_attention_heads": True}, "`num_attention_heads` must be a positive integer, got True"),
    ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a positive number"),
    ({"rope_theta": 0.0, "rope_parameters": {"rope_theta": -1}}, "`rope_theta` must be a positive number, got -1"),
    ({"rope_scaling": "linear"}, "rope parameters must be an object"),
    ({"tie_word_embeddings": 1}, "`tie_word_embeddings` must be true or false"),
    ({"hidden_act": 3}, "`hidden_act` must be a string"),
    ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) is not a multiple of `num_key_value_heads` \(3\)"),
    ({"head_dim": 5}, "the rotated part of `head_dim` must be even, got 5 of 5"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[next(iter(f)) for f, _ in WRONG])
def test_wrong_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=f"^config.json: .*{message}"):
        spec(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('"llama"', "does not hold a JSON object"),
        ("{}", "names no `model_type`"),
    ],
    ids=["cut", "deep", "string", "empty"],
)
def test_unreadable_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=message):
        spec_of(ModelConfig(read_object(tmp_path / "config.json", StartupError)))


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read .*config\.json: No such file"):
        examine(tmp_path)


def test_a_factor_takes_the_place_of_the_files_scaling() -> None:
    """ROPE_SCALING and ROPE_FACTOR: as if the file had named that scaling, with its own theta and dimensions."""
    named = spec(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    for given in (None, {"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 8.0}):
        changed = with_linear_rope(spec(rope_theta=5e5, rope_scaling=given), 4.0)
        for mine, theirs in zip(changed.ropes, named.ropes, strict=True):
            assert mine is not None and theirs is not None
            assert torch.equal(inverse_frequencies(mine)[0], inverse_frequencies(theirs)[0])


def test_a_factor_for_positions_that_do_not_rotate() -> None:
    plain = dataclasses.replace(spec(), ropes=(None,) * 4)
    with pytest.raises(StartupError, match="--rope-scaling: this model has no rotary positions"):
        with_linear_rope(plain, 2.0)
