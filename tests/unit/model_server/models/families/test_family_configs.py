"""Configs of the families: what a silent file means, what fields were called before, and what is refused."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import pytest

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Spec
from model_server.models.families import FAMILIES, pooled_spec_of, spec_of
from model_server.models.families.base import UnknownFamilyError

# transformers has no config class for these.
OWN = ("RefinedWeb", "RefinedWebModel", "baichuan")
# Without these a file is refused.
SIZES = {
    "vocab_size", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads",
    "n_head", "n_heads", "intermediate_size", "ffn_dim",
}  # fmt: skip
# Nor without these, for which transformers has no usable default.
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"num_attention_heads": 32},
}
# What other sizes say, too.
DERIVED = {"mamba": {"intermediate_size"}, "falcon_mamba": {"intermediate_size"}}


@cache
def defaults(model_type: str) -> dict[str, Any]:
    """transformers' default config of the type, as it would be saved."""
    from transformers import AutoConfig

    fields: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
    return fields | NEEDED.get(model_type, {})


def spec(model_type: str, without: tuple[str, ...] = (), **fields: Any) -> Spec:
    known = {name: value for name, value in defaults(model_type).items() if name not in without}
    return spec_of(ModelConfig({**known, **fields}))


def numbers(made: Spec) -> dict[str, Any]:
    """All fields; ropes without the block they came from."""
    fields = {name: getattr(made, name) for name in made.__slots__}
    fields["ropes"] = [r and (r.kind, r.theta, r.dim, r.max_positions) for r in made.ropes]
    return fields


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - set(OWN)))
def test_a_silent_file_means_what_it_means_to_transformers(model_type: str) -> None:
    whole = numbers(spec(model_type))
    for name in defaults(model_type):
        if name == "model_type":
            continue
        if name in SIZES - DERIVED.get(model_type, set()) or name in NEEDED.get(model_type, {}):
            with pytest.raises(StartupError, match="must be a positive integer, got None"):
                spec(model_type, without=(name,))
        else:
            assert numbers(spec(model_type, without=(name,))) == whole, name


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - set(OWN)))
def test_a_refusal_names_the_field_that_the_file_has(model_type: str) -> None:
    """Whatever the field is called here, where it has another family's name."""
    for name in defaults(model_type).keys() - {"model_type"}:
        try:
            spec(model_type, **{name: -7})
        except StartupError as error:
            named = re.search(r"config\.json: `(\w+)`", str(error))
            assert named is None or named[1] == name, str(error)


def test_unknown_types_are_told_from_unusable_ones() -> None:
    with pytest.raises(UnknownFamilyError, match="Unsupported model type rwkv"):
        spec("rwkv")
    with pytest.raises(StartupError) as caught:
        spec("llama", hidden_size=0)
    assert not isinstance(caught.value, UnknownFamilyError)


def test_falcon_under_its_old_names() -> None:
    """config.json of tiiuae/falcon-40b, falcon-7b and falcon-rw-1b as first published, as far as it tells shapes."""
    large = spec_of(
        ModelConfig(
            {
                "model_type": "RefinedWeb", "hidden_size": 8192, "n_layer": 60, "n_head": 128, "n_head_kv": 8,
                "vocab_size": 65024, "alibi": False, "bias": False, "parallel_attn": True, "layer_norm_epsilon": 1e-5,
            }
        )
    )  # fmt: skip
    assert (large.num_heads, large.num_kv_heads, large.head_dim, large.block) == (128, 8, 64, "parallel")
    assert (large.names.attention_norm, large.names.mlp_norm, large.packing) == ("ln_attn", "ln_mlp", "grouped")
    assert (large.intermediate_size, large.tied_head, large.alibi) == (32768, True, None)
    small = {
        "model_type": "RefinedWebModel", "hidden_size": 4544, "n_layer": 32, "n_head": 71, "vocab_size": 65024,
        "alibi": False, "bias": False, "multi_query": True, "parallel_attn": True, "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    seven = spec_of(ModelConfig(small))
    assert (seven.num_kv_heads, seven.block, seven.names.mlp_norm) == (1, "parallel", None)
    assert seven.names.attention_norm == "input_layernorm"
    sizes = {"hidden_size": 2048, "n_layer": 24, "n_head": 32}
    rw = spec_of(ModelConfig({**small, **sizes, "alibi": True, "multi_query": False, "parallel_attn": False}))
    assert (rw.num_kv_heads, rw.block, rw.names.mlp_norm) == (32, "sequential", "post_attention_layernorm")
    assert rw.alibi is not None
    assert rw.alibi_bfloat16_scale == 1 / 8
    assert set(rw.ropes) == {None}


BAICHUAN = {
    "model_type": "baichuan", "hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 40, "vocab_size": 125696, "model_max_length": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_baichuan() -> None:
    large = spec_of(ModelConfig(BAICHUAN))
    assert (large.max_positions, large.normalized_head, large.scale) == (4096, True, 1 / math.sqrt(128))
    assert large.alibi is not None
    assert set(large.ropes) == {None}
    small = {**BAICHUAN, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 64000}
    seven = spec_of(ModelConfig({**small, "max_position_embeddings": 4096}))
    assert (seven.alibi, seven.normalized_head) == (None, False)
    assert seven.ropes[0] is not None


def test_gemma_says_gelu_and_means_the_approximation() -> None:
    assert spec("gemma", hidden_act="gelu", hidden_activation=None).activation == "gelu_pytorch_tanh"
    assert spec("gemma", hidden_act="gelu", hidden_activation="gelu").activation == "gelu_pytorch_tanh"
    assert spec("gemma", hidden_act="silu", hidden_activation="gelu").activation == "silu"
    assert spec("gemma2", hidden_act="silu", hidden_activation="gelu").activation == "gelu"


def test_caps_of_gemma2() -> None:
    assert (spec("gemma2").softcap, spec("gemma2").logits_softcap) == (50.0, 30.0)
    off = spec("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.softcap, off.logits_softcap) == (None, None)


def test_gemma3_in_both_spellings() -> None:
    """rope_theta, rope_scaling and rope_local_base_freq before transformers 5."""
    without = ("rope_parameters", "layer_types")
    old = spec(
        "gemma3_text", without, rope_theta=5e5, rope_local_base_freq=2e4, sliding_window_pattern=2,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, num_hidden_layers=4,
    )  # fmt: skip
    assert old.windows == (4096, None, 4096, None)
    kinds = [(r.kind, r.theta, r.parameters.get("factor")) for r in old.ropes if r]
    assert kinds == [("default", 2e4, None), ("linear", 5e5, 8.0)] * 2


def test_gemma3_with_the_rotation_of_one_kind_of_layer() -> None:
    made = spec("gemma3_text", rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0}})
    ropes = {rope.kind: rope for rope in made.ropes if rope is not None}
    assert (ropes["linear"].theta, ropes["default"].theta) == (1e6, 1e4)
    scaled = spec("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert {rope.kind for rope in scaled.ropes if rope is not None} == {"linear", "default"}
    older = spec("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0})
    assert {rope.kind for rope in older.ropes if rope is not None} == {"default"}, "as in transformers"


def test_added_rotations_of_gemma4_replace_those_that_are_there() -> None:
    made = spec("gemma4_text", rope_scaling=_KINDS)
    assert {rope.kind for rope in made.ropes if rope is not None} == {"linear", "default"}


def test_rotations_of_gpt_oss_where_the_file_has_an_empty_object() -> None:
    """Without one they are YaRN's."""
    assert {rope.kind for rope in spec("gpt_oss").ropes if rope is not None} == {"yarn"}
    empty = spec("gpt_oss", rope_parameters={})
    assert {(rope.kind, rope.theta) for rope in empty.ropes if rope is not None} == {("default", 150000.0)}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gpt2", {"rms_norm_eps": 0.5, "hidden_act": "relu", "intermediate_size": 8}),
        ("gptj", {"rms_norm_eps": 0.5, "hidden_act": "relu", "intermediate_size": 8}),
        ("gptj", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5.0}),
        ("opt", {"rms_norm_eps": 0.5, "hidden_act": "gelu"}),
        ("phi", {"rms_norm_eps": 0.5}),
        ("stablelm", {"rms_norm_eps": 0.5}),
        ("cohere", {"rms_norm_eps": 0.5}),
        ("bloom", {"rms_norm_eps": 0.5}),
        ("falcon", {"rms_norm_eps": 0.5}),
        ("mpt", {"rms_norm_eps": 0.5}),
        ("starcoder2", {"rms_norm_eps": 0.5}),
        ("gpt_neox", {"rms_norm_eps": 0.5, "rope_theta": 3.0, "partial_rotary_factor": 1.0}),
    ],
)
def test_fields_of_other_types_are_not_read(model_type: str, fields: dict[str, Any]) -> None:
    own = {"layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "activation_function", "n_inner", "rope_parameters"}
    left = tuple(own & set(defaults(model_type)))
    assert numbers(spec(model_type, without=left, **fields)) == numbers(spec(model_type, without=left))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_models_whose_tokens_see_those_behind_them_generate_no_text(model_type: str, fields: dict[str, Any]) -> None:
    with pytest.raises(
        StartupError, match=f"`{next(iter(fields))}` is .* generates no text; for embeddings use --task"
    ):
        spec(model_type, **fields)
    bidirectional = pooled_spec_of(ModelConfig(defaults(model_type) | fields), ())
    assert bidirectional.bidirectional


def test_experts_in_too_few_groups() -> None:
    fields = {"n_routed_experts": 8, "n_group": 8, "topk_group": 2, "num_experts_per_tok": 3}
    for model_type in ("deepseek_v2", "deepseek_v3"):
        method = {"topk_method": "group_limited_greedy"} if model_type == "deepseek_v2" else {}
        with pytest.raises(StartupError, match=r"per_tok` is 3, but `topk_group` \(2\) groups have 2 experts"):
            spec(model_type, **fields, **method)


def test_partial_rotation_in_all_spellings() -> None:
    for made in (
        spec("gpt_neox", without=("rope_parameters",), rotary_pct=0.5, rotary_emb_base=500),
        spec("gpt_neox", rope_parameters={"rope_theta": 500, "rope_type": "default", "partial_rotary_factor": 0.5}),
    ):
        (rope,) = {(r.dim, r.theta) for r in made.ropes if r}
        assert rope == (48, 500.0)
    phi2 = spec("phi", without=("rope_parameters",), partial_rotary_factor=0.4, hidden_size=2560)
    assert {rope.dim for rope in phi2.ropes if rope} == {32}


def test_layers_without_rotation() -> None:
    rotates = [rope is not None for rope in spec("smollm3", without=("no_rope_layers",)).ropes]
    assert rotates[:8] == [True, True, True, False] * 2
    mixed = spec("cohere2", without=("layer_types",), num_hidden_layers=4, sliding_window=8, sliding_window_pattern=2)
    assert mixed.windows == (8, None, 8, None)
    assert [rope is not None for rope in mixed.ropes] == [True, False, True, False]


_KINDS = {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
_OF_PHIMOE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "long_mscale": 2.0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (model_type, {field: _KINDS}, f"have `full_attention`, which this version does not serve for {model_type}")
        for model_type in ("llama", "cohere2", "gpt_oss", "qwen3", "deepseek_v3", "smollm3")
        for field in ("rope_parameters", "rope_scaling")
    ),
    ("llama", {"rope_scaling": _OF_PHIMOE}, "`long_mscale`, which this version does not serve for llama"),
    ("phi3", {"rope_parameters": _OF_PHIMOE}, "`long_mscale`, which this version does not serve for phi3"),
    ("gemma3_text", {"rope_scaling": _KINDS}, "`full_attention`, which this version does not serve for gemma3_text"),
    ("gemma4_text", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "must have an object for sliding_att"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "`apply_residual_connection_post_layernorm` is not"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "`qk_ln` is not served"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "`prefix_lm` is not served"),
    ("smollm3", {"no_rope_layers": [1]}, "`no_rope_layers` must be a list of 36 numbers"),
    ("gemma3_text", {"layer_types": ["chunked_attention"] * 26}, "`layer_types` must name 26 times one of"),
    (
        "phi",
        {"rope_parameters": {"partial_rotary_factor": 0.33}},
        "the rotated part of `head_dim` must be even, got 21",
    ),
    ("gptj", {"n_head": 0}, "`n_head` must be a positive integer"),
    ("gemma4_text", {"num_kv_shared_layers": 26}, "leaves no layer of some kind"),
    ("gemma4_text", {"vocab_size_per_layer_input": 8}, "must be at least `vocab_size`"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "tokens of this model see those behind them"),
    ("gemma4_text", {"rope_parameters": {"rope_type": "default"}}, "must have an object for sliding_attention"),
    ("mpt", {"logit_scale": "no number"}, "`logit_scale` must be a positive number"),
    ("mistral4", {"head_dim": 96}, "`head_dim` is served for mistral4 as 128 only, got 96"),
]


@pytest.mark.parametrize(("model_type", "fields", "message"), REFUSED, ids=[next(iter(f)) for _, f, _ in REFUSED])
def test_refused(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec(model_type, **fields)


def test_mpt_follows_its_own_code() -> None:
    """What transformers' port passes over: learned positions instead of ALiBi, the scale of logits, grouped heads."""
    learned = spec("mpt", attn_config={"alibi": False}, learned_pos_emb=True)
    assert (learned.alibi, learned.names.positions) == (None, "transformer.wpe")
    assert spec("mpt", logit_scale="inv_sqrt_d_model").logits_multiplier == 1 / math.sqrt(2048)
    assert spec("mpt", attn_config={"kv_n_heads": 4}).num_kv_heads == 4
    assert spec("mpt", attn_config={"attn_type": "multiquery_attention"}).num_kv_heads == 1
    steep = spec("mpt", attn_config={"alibi_bias_max": 16}).alibi
    assert steep is not None
    assert steep[-1] == 2.0**-16


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
def test_where_queries_begin_to_sharpen(model_type: str) -> None:
    """By the length before the rotations were scaled, which counts first outside of their block."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.2}
    found = spec(model_type, rope_parameters=block).temperature
    assert found is not None and (found.strength, found.interval, found.offset) == (0.2, 32, 0)
    outside = spec(model_type, rope_parameters=block, original_max_position_embeddings=64).temperature
    assert outside is not None and outside.interval == 64
    plain = {name: value for name, value in block.items() if name != "llama_4_scaling_beta"}
    assert spec(model_type, rope_parameters=plain).temperature is None


def test_gemma4_as_published_and_as_transformers_writes_it() -> None:
    """The sizes of full layers once, or by layer; what only transformers serves is told from what nobody can."""
    sizes = {"num_global_key_value_heads": 2, "global_head_dim": 64, "attention_k_eq_v": True}
    made = spec("gemma4_text", ("per_layer_config",), num_kv_shared_layers=8, use_double_wide_mlp=True, **sizes)
    heads = [(one.num_kv_heads, one.head_dim, one.values_of_keys) for one in made.sizes]
    assert heads == [*[(4, 256, False)] * 5, (2, 64, True)] * 5
    assert made.kv_from == (*[None] * 22, 21, 17, *[21] * 5, 17)
    assert [one.intermediate_size for one in made.sizes] == [9216] * 22 + [18432] * 8
    layers = {f"{index:02}": {"head_dim": 64, "num_key_value_heads": 2} for index in range(5, 30, 6)}
    assert spec("gemma4_text", per_layer_config=layers, attention_k_eq_v=True).sizes[5] == made.sizes[5]
    assert spec("gemma4_unified_text").layer_input_width is None
    assert spec("gemma4_text", hidden_size_per_layer_input=0).layer_input_width is None
    assert spec("gemma4_text", use_bidirectional_attention="vision") == spec("gemma4_text")
    for strange in ({"5": {"intermediate_size": 64}}, {"5": {"head_dim": 64}}):
        with pytest.raises(UnknownFamilyError, match="`per_layer_config` is served natively"):
            spec("gemma4_text", per_layer_config=strange)
