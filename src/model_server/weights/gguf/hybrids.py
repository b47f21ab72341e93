"""The architectures of GGUF files whose layers mostly lack attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_server.weights.gguf.architecture import NUMBERED, OUTSIDE, RMS, Architecture, experts, mlp, shared_expert

_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_COUNTS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip


def attention(prefix: str = "self_attn", output: str = "o_proj") -> dict[str, str]:
    found = {f"attn_{one}": f"{prefix}.{one}_proj" for one in ("q", "k", "v")}
    return {**found, "attn_output": f"{prefix}.{output}"}


def _mamba2(prefix: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return modules, and the other tensors."""
    modules = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    tensors = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    named = [{ours: f"{prefix}.{name}" for ours, name in given.items()} for given in (modules, tensors)]
    return named[0], named[1]


def _mamba1(prefix: str) -> tuple[dict[str, str], dict[str, str]]:
    modules, tensors = _mamba2(prefix)
    del modules["ssm_norm"], tensors["ssm_dt.bias"]
    norms = {f"ssm_{one}_norm": f"{prefix}.{one}_layernorm" for one in ("dt", "b", "c")}
    return {**modules, **norms, "ssm_x": f"{prefix}.x_proj", "ssm_dt": f"{prefix}.dt_proj"}, tensors


_FINAL_OUTSIDE = {**OUTSIDE, "output_norm": "model.final_layernorm"}
_LFM2 = {
    **attention(output="out_proj"),
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm", "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm", **mlp("feed_forward", NUMBERED),
    "shortconv.in_proj": "conv.in_proj", "shortconv.conv": "conv.conv", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_DELTA = {
    **_NORMS, **attention(),
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_DELTA_TENSORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_DELTA_EXPERTS = {
    **_DELTA, "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **shared_expert("mlp.shared_expert"),
}  # fmt: skip
_DELTA_COUNTS = {**_COUNTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_MAMBA, _MAMBA_TENSORS = _mamba2("mamba")
_MAMBA1, _MAMBA1_TENSORS = _mamba1("mamba")
_ALONE, _ALONE_TENSORS = _mamba1("mixer")
_MIXER, _MIXER_TENSORS = _mamba2("mixer")
_SSM = {"d_conv": "ssm.conv_kernel", "d_state": "ssm.state_size", "n_groups": "ssm.group_count"}
_NEMOTRON = {
    **_MIXER, **attention("mixer"), "attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
}  # fmt: skip
_NEMOTRON_FIELDS = {
    "conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size", "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
}  # fmt: skip
_NEMOTRON_OUTSIDE = {
    "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head",
}  # fmt: skip


def attending(given: Mapping[str, Any], count: int) -> list[bool]:
    """Return which layers have keys, perhaps without those of multi-token prediction."""
    heads = given.get("attention.head_count_kv")
    if not isinstance(heads, list):
        return [bool(heads)] * count
    if len(heads) not in (count, given["block_count"]):
        key = f"{given['general.architecture']}.attention.head_count_kv"
        raise ValueError(f"`{key}` has {len(heads)} numbers for {given['block_count']} layers")
    return [bool(number) for number in heads][:count]


def _lfm2(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {True: "full_attention", False: "conv"}
    layers = [kinds[one] for one in attending(given, fields["num_hidden_layers"])]
    return {"layer_types": layers, "conv_L_cache": given["shortconv.l_cache"], "block_auto_adjust_ff_dim": False}


def _delta(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    heads, count = given["ssm.time_step_rank"], fields["num_hidden_layers"]
    found = {
        "linear_conv_kernel_dim": given["ssm.conv_kernel"],
        "linear_num_key_heads": given["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": given["ssm.state_size"],
        "linear_value_head_dim": given["ssm.inner_size"] // heads,
        "full_attention_interval": given.get("full_attention_interval", 4),
    }
    recurrent = given.get("attention.recurrent_layers")
    if isinstance(recurrent, list):
        kinds = {True: "linear_attention", False: "full_attention"}
        found["layer_types"] = [kinds[bool(one)] for one in recurrent[:count]]
    return found


def _granite(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    attends, heads = attending(given, fields["num_hidden_layers"]), given["ssm.time_step_rank"]
    shared = given.get("expert_shared_feed_forward_length") if given.get("expert_count") else None
    return {
        "layer_types": ["attention" if one else "mamba" for one in attends],
        **{f"mamba_{name}": given[key] for name, key in _SSM.items()},
        "mamba_n_heads": heads,
        "mamba_d_head": given["ssm.inner_size"] // heads,
        "mamba_expand": given["ssm.inner_size"] // fields["hidden_size"],
        "shared_intermediate_size": shared or fields["intermediate_size"],
        "num_local_experts": given.get("expert_count", 0),
        "num_experts_per_tok": given.get("expert_used_count", 0),
    }


def _falcon(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    heads = given["ssm.time_step_rank"]
    return {
        **{f"mamba_{name}": given[key] for name, key in _SSM.items()},
        "mamba_n_heads": heads,
        "mamba_d_head": given["ssm.inner_size"] // heads,
        "mamba_d_ssm": given["ssm.inner_size"],
    }


def _nemotron(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    count, sizes = fields["num_hidden_layers"], given["feed_forward_length"]
    mlp = "moe" if given.get("expert_count") else "mlp"
    kinds = [
        "full_attention" if attends else mlp if size else "linear_attention"
        for attends, size in zip(attending(given, count), sizes[:count], strict=True)
    ]
    return {
        "layers_block_type": kinds,
        "mamba_head_dim": given["ssm.inner_size"] // given["ssm.time_step_rank"],
    }


def _mamba(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "falcon_mamba"} if given.get("ssm.dt_b_c_rms") else {}


def _mamba2_alone(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    heads, values = given["ssm.time_step_rank"], given["ssm.inner_size"]
    return {"num_heads": heads, "head_dim": values // heads, "expand": values // fields["hidden_size"]}


def _jamba(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    attends, experts = attending(given, fields["num_hidden_layers"]), fields["layers_with_experts"]
    return {
        **_every("attn_layer", attends, "jamba.attention.head_count_kv"),
        **(_every("expert_layer", experts, "blk.N.ffn_gate_inp.weight") if any(experts) else {"num_experts": 1}),
        "mamba_expand": given["ssm.inner_size"] // fields["hidden_size"],
        "mamba_d_conv": given["ssm.conv_kernel"],
        "mamba_d_state": given["ssm.state_size"],
        "mamba_dt_rank": given["ssm.time_step_rank"],
    }


def _every(name: str, chosen: list[bool], key: str) -> dict[str, int]:
    """Return the period and the first of layers that follow each other in equal distances, as the file's `key` says."""
    numbers = [index for index, one in enumerate(chosen) if one]
    first = numbers[0] if numbers else len(chosen)
    period = numbers[1] - first if len(numbers) > 1 else len(chosen) + 1
    if chosen != [index % period == first for index in range(len(chosen))]:
        raise ValueError(f"layers {numbers} of `{key}` do not follow each other in equal distances")
    return {f"{name}_period": period, f"{name}_offset": first}


_LFM2_OUTSIDE = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_NORM_EPS = ("norm_eps", RMS[1])
_DELTA_FAMILY: dict[str, Any] = {
    "tensors": _DELTA_TENSORS, "added": 1.0, "not_added": ("linear_attn.norm",), "derived": _delta,
}  # fmt: skip
_NEMOTRON_FAMILY: dict[str, Any] = {
    "model_type": "nemotron_h", "adjacent": True, "epsilon": ("layer_norm_epsilon", RMS[1]), "derived": _nemotron,
    "layers": "backbone.layers", "outside": _NEMOTRON_OUTSIDE,
}  # fmt: skip

_WITHOUT_ATTENTION: dict[str, Any] = {
    "attends": False, "epsilon": ("layer_norm_epsilon", RMS[1]), "layers": "backbone.layers",
    "outside": _NEMOTRON_OUTSIDE,
}  # fmt: skip

HYBRIDS = {
    "lfm2": Architecture(model_type="lfm2", layer=_LFM2, outside=_LFM2_OUTSIDE, epsilon=_NORM_EPS, derived=_lfm2),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        layer={**_LFM2, "ffn_gate_inp": "feed_forward.gate"},
        tensors={"exp_probs_b.bias": "feed_forward.expert_bias"},
        experts=experts("feed_forward.experts", NUMBERED),
        outside=_LFM2_OUTSIDE,
        epsilon=_NORM_EPS,
        derived=_lfm2,
        fields={**_COUNTS, "num_dense_layers": "leading_dense_block_count"},
        fixed={"norm_topk_prob": True, "use_expert_bias": True},
        expected={"expert_gating_func": (2,)},
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        layer=_DELTA_EXPERTS,
        experts=experts("mlp.experts"),
        fields=_DELTA_COUNTS,
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1},
        present={"linear_qkv_apart": "blk.0.attn_qkv.weight"},
        **_DELTA_FAMILY,
    ),
    "qwen35": Architecture(model_type="qwen3_5_text", layer={**_DELTA, **mlp("mlp")}, tiled=True, **_DELTA_FAMILY),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        layer=_DELTA_EXPERTS,
        experts=experts("mlp.experts"),
        fields=_DELTA_COUNTS,
        tiled=True,
        **_DELTA_FAMILY,
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        layer={
            **_MAMBA, **attention(), "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            **{f"ffn_gate{one}": "shared_mlp.gate_proj" for one in ("", "_shexp")},
            **{f"ffn_up{one}": "shared_mlp.up_proj" for one in ("", "_shexp")},
            **{f"ffn_down{one}": "shared_mlp.output_linear" for one in ("", "_shexp")},
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        tensors=_MAMBA_TENSORS,
        experts=experts("block_sparse_moe.experts"),
        may_be_dense=True,
        adjacent=True,
        derived=_granite,
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        fixed={"position_embedding_type": "nope", "separate_matrices": True},
        expected={"rope.scaling.finetuned": (False,)},
    ),
    # Its factors are in the weights.
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        layer={
            **_MAMBA, **attention(), "attn_norm": "input_layernorm", **mlp("feed_forward"),
        },
        tensors={**_MAMBA_TENSORS, "ffn_norm": "pre_ff_layernorm.weight"},
        outside=_FINAL_OUTSIDE,
        derived=_falcon,
        present={"mamba_rms_norm": "blk.0.ssm_norm.weight"},
        fixed={"mamba_norm_before_gate": False},
    ),
    "jamba": Architecture(
        model_type="jamba",
        layer={
            **_MAMBA1, **attention(), "attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm",
            **mlp("feed_forward"), "ffn_gate_inp": "feed_forward.router",
        },
        tensors=_MAMBA1_TENSORS,
        experts=experts("feed_forward.experts"),
        may_be_dense=True,
        outside=_FINAL_OUTSIDE,
        optional={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        present={"layers_with_experts": "blk.{}.ffn_gate_inp.weight"},
        derived=_jamba,
    ),
    "mamba": Architecture(
        model_type="mamba",
        layer={**_ALONE, "attn_norm": "norm"},
        tensors=_ALONE_TENSORS,
        fields={
            "intermediate_size": "ssm.inner_size",
            "conv_kernel": "ssm.conv_kernel",
            "state_size": "ssm.state_size",
            "time_step_rank": "ssm.time_step_rank",
        },
        derived=_mamba,
        **_WITHOUT_ATTENTION,
    ),
    "mamba2": Architecture(
        model_type="mamba2",
        layer={**_MIXER, "attn_norm": "norm"},
        tensors=_MIXER_TENSORS,
        fields={"conv_kernel": "ssm.conv_kernel", "state_size": "ssm.state_size", "n_groups": "ssm.group_count"},
        derived=_mamba2_alone,
        **_WITHOUT_ATTENTION,
    ),
    "nemotron_h": Architecture(
        layer=_NEMOTRON, tensors=_MIXER_TENSORS, fields=_NEMOTRON_FIELDS, **_NEMOTRON_FAMILY
    ),
    "nemotron_h_moe": Architecture(
        layer={
            **_NEMOTRON, "ffn_gate_inp": "mixer.gate", "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
        },
        tensors={**_MIXER_TENSORS, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        experts={f"ffn_{kind}_exps": f"mixer.experts.{{}}.{kind}_proj" for kind in ("up", "down")},
        fields={
            **_NEMOTRON_FIELDS,
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
        },
        optional={"moe_latent_size": "moe_latent_size"},
        expected={"expert_gating_func": (0, 2), "expert_group_count": (0, 1)},
        **_NEMOTRON_FAMILY,
    ),
}  # fmt: skip
