"""GGUF files of tiny models with recurrent layers, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from gguf import GGUFWriter
from torch import Tensor

_ARCHITECTURES = {
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h", "kimi_linear": "kimi-linear", "glm_moe_dsa": "glm-dsa",
    "jamba": "jamba", "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2",
}  # fmt: skip
HYBRIDS = tuple(_ARCHITECTURES)
PLAIN = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d", "ssm_norm")
_RENAMED = {
    "mixer.dt_bias": "mixer.dt.bias",
    ".dt_bias": ".dt_proj.bias",
    "correction_bias": "correction.bias",
    "expert_bias": "expert_bias.bias",
}


@dataclass(frozen=True)
class Move:
    """Tensors of transformers that are others in a file, and back."""

    ours: Sequence[str]
    theirs: Sequence[str]
    convert: Callable[..., Sequence[Tensor]] = lambda *one: one
    back: Callable[..., Sequence[Tensor]] = lambda *one: one


WITHOUT_ATTENTION = ("mamba", "falcon_mamba", "mamba2")


def _is_mamba1(config: Mapping[str, Any]) -> bool:
    return config["model_type"] in ("jamba", "mamba", "falcon_mamba")


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return llama.cpp's name."""
    name = _ARCHITECTURES[config["model_type"]]
    return f"{name}_moe" if "moe" in config.get("layers_block_type", ()) else name


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of experts that the model has."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = next((int(config[name]) for name in names if name in config), 0)
    return found if "moe" in config.get("layers_block_type", ["moe"]) else 0


def num_layers_of(config: Mapping[str, Any]) -> int:
    """Return the number of layers."""
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


def joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return names without the experts' numbers, and the names that they stand for."""
    found: dict[str, list[str]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        found.setdefault(re.sub(r"experts\.[0-9]+\.", "experts.", name), []).append(name)
    return found


def stack(ours: Sequence[str], theirs: str) -> Move:
    """Return the move of experts into one tensor."""
    return Move(ours, [theirs], lambda *ones: [torch.stack(ones)], lambda one: list(one.clone()))


def hybrid_moves(tensors: Mapping[str, Tensor], config: Mapping[str, Any], names: gguf.TensorNameMap) -> Iterator[Move]:
    """Yield what becomes of each tensor."""
    for joined, ours in joined_experts(tensors).items():
        block = joined.partition("layers.")[2].partition(".")[0]
        if joined.endswith(("shared_mlp.input_linear.weight", "block_sparse_moe.input_linear.weight")):
            experts = "exps" if "block_sparse" in joined else "shexp" if config["num_local_experts"] else ""
            kinds = [f"blk.{block}.ffn_{kind}{experts and '_' + experts}.weight" for kind in ("gate", "up")]
            yield Move(ours, kinds, lambda one: one.chunk(2, -2), lambda *ones: [torch.cat(ones, -2)])
        elif joined.endswith("kv_b_proj.weight"):
            heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
            yield Move(
                ours,
                [f"blk.{block}.attn_{kind}_b.weight" for kind in "kv"],
                lambda one, heads=heads, plain=plain: _by_matrices(one, heads, plain),
                lambda k, v: [torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1)],
            )
        elif joined.endswith("in_proj_qkvz.weight"):
            theirs = [f"blk.{block}.{kind}.weight" for kind in ("attn_qkv", "attn_gate")]
            yield Move(ours, theirs, lambda one: _apart(one, config), lambda *ones: [_by_heads(*ones, config)])
        else:
            theirs = _name(joined, config, names)
            if ours != [joined]:
                yield stack(ours, theirs)
            else:
                yield Move(
                    ours,
                    [theirs],
                    lambda one, name=joined: [_as_theirs(one, name, config)],
                    lambda one, name=joined: [_as_ours(one, name, config)],
                )


def _name(name: str, config: Mapping[str, Any], names: gguf.TensorNameMap) -> str:
    if "shared_mlp.output" in name and not config["num_local_experts"]:
        return f"blk.{name.split('.')[2]}.ffn_down.weight"
    if "output_linear" in name and "block_sparse" in name:
        return f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
    if name == "lm_head.weight":
        return "output.weight"
    for ours, theirs in _RENAMED.items():
        name = name.removesuffix(ours) + theirs if name.endswith(ours) else name
    name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
    name = re.sub(r"^backbone\.(layers\.\d+)\.mixer\.experts\.(\w+)\.weight", r"model.\1.mlp.experts.\2.weight", name)
    name = re.sub(r"^model\.(layers\.\d+)\.feed_forward\.experts\.(\w+_proj)", r"model.\1.mlp.experts.\2", name)
    name = re.sub(r"^model\.(layers\.\d+)\.feed_forward\.experts", r"\1.feed_forward.experts", name)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _as_theirs(tensor: Tensor, name: str, config: Mapping[str, Any]) -> Tensor:
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if _adds_one(name, config):
        tensor = tensor + 1
    tensor = _folded(tensor, name, config, back=False)
    tensor = _tiled(tensor, name, config, back=False)
    if re.search("[qkv]_conv1d", name):
        return tensor.unsqueeze(0)
    if "conv1d.weight" in name or "conv.conv" in name:
        return tensor.squeeze(1)
    if config["model_type"] in ("granitemoehybrid", "nemotron_h") and (heads := _heads(name, config)):
        return tensor.view(heads, 2, len(tensor) // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    if _is_mamba1(config) or config["model_type"] in ("kimi_linear", "glm_moe_dsa"):
        return tensor
    if "linear_attn" not in name and name.endswith((".A_log", ".D")):
        return tensor.unsqueeze(1)
    is_grouped = name.endswith(("mamba.norm.weight", "mixer.norm.weight"))
    return tensor.view(_groups(config), -1) if is_grouped else tensor


def _as_ours(tensor: Tensor, name: str, config: Mapping[str, Any]) -> Tensor:
    if config["model_type"] == "kimi_linear":
        tensor = tensor.squeeze(0) if "conv1d" in name else tensor
    elif "conv1d.weight" in name or "conv.conv" in name:
        tensor = tensor.unsqueeze(1)
    elif config["model_type"] in ("granitemoehybrid", "nemotron_h") and (heads := _heads(name, config)):
        tensor = tensor.view(heads, len(tensor) // heads // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    elif not _is_mamba1(config) and name.endswith((".A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.flatten()
    tensor = _tiled(tensor, name, config, back=True)
    tensor = _folded(tensor, name, config, back=True)
    if _adds_one(name, config):
        tensor = tensor - 1
    return (-tensor).log() if name.endswith("A_log") else tensor


def _adds_one(name: str, config: Mapping[str, Any]) -> bool:
    is_qwen = config["model_type"].startswith("qwen3")
    return is_qwen and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def _groups(config: Mapping[str, Any]) -> int:
    return int(config.get("mamba_n_groups", config.get("n_groups", 1)))


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    if name.endswith("q_proj.weight"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if name.endswith("k_proj.weight") else None


def _delta(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    keys = config["linear_num_key_heads"]
    repeats = config["linear_num_value_heads"] // keys
    return keys, repeats, config["linear_key_head_dim"], config["linear_value_head_dim"]


def _tiled(tensor: Tensor, name: str, config: Mapping[str, Any], *, back: bool) -> Tensor:
    """Order value heads by their number within a key head first."""
    if config["model_type"] not in ("qwen3_5_text", "qwen3_5_moe_text") or "linear_attn." not in name:
        return tensor
    keys, repeats, key_dim, value_dim = _delta(config)
    order = torch.arange(keys * repeats).view(keys, repeats).t().flatten()
    order = order.argsort() if back else order

    def rows(values: Tensor, size: int) -> Tensor:
        return values.view(keys * repeats, size, *values.shape[1:])[order].reshape(values.shape)

    kind = name.partition("linear_attn.")[2]
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat((tensor[: 2 * keys * key_dim], rows(tensor[2 * keys * key_dim :], value_dim)))
    if kind == "out_proj.weight":
        return rows(tensor.t().contiguous(), value_dim).t()
    sizes = {"in_proj_z.weight": value_dim, "in_proj_a.weight": 1, "in_proj_b.weight": 1, "A_log": 1, "dt_bias": 1}
    return rows(tensor, sizes[kind]) if kind in sizes else tensor


def _by_matrices(tensor: Tensor, heads: int, plain: int) -> list[Tensor]:
    by_head = tensor.view(heads, -1, tensor.shape[1])
    return [by_head[:, :plain].transpose(1, 2).contiguous(), by_head[:, plain:].contiguous()]


def _apart(tensor: Tensor, config: Mapping[str, Any]) -> list[Tensor]:
    keys, repeats, key_dim, value_dim = _delta(config)
    kinds = tensor.view(keys, -1, tensor.shape[1]).split([key_dim, key_dim, *[repeats * value_dim] * 2], 1)
    *qkv, gates = (kind.flatten(0, 1) for kind in kinds)
    return [torch.cat(qkv), gates]


def _by_heads(qkv: Tensor, gates: Tensor, config: Mapping[str, Any]) -> Tensor:
    keys, repeats, key_dim, value_dim = _delta(config)
    kinds = *qkv.split([keys * key_dim, keys * key_dim, keys * repeats * value_dim]), gates
    return torch.cat([kind.view(keys, -1, qkv.shape[1]) for kind in kinds], 1).flatten(0, 1)


def _folded(tensor: Tensor, name: str, config: Mapping[str, Any], *, back: bool) -> Tensor:
    """Multiply by Falcon H1's factors, or divide."""
    if config["model_type"] != "falcon_h1" or tensor.dim() != 2:
        return tensor
    attention = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    factors: dict[str, float] = {
        "q_proj": attention, "v_proj": attention, "k_proj": attention * config["key_multiplier"],
        "o_proj": config["attention_out_multiplier"], "mamba.out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate, "down_proj": down, "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    kind = next((kind for kind in factors if f"{kind}.weight" in name), None)
    factor: float | Tensor = factors.get(kind or "", 1.0)
    if "mamba.in_proj" in name:
        values, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        counts = [values, values, states, states, config["mamba_n_heads"]]
        each = torch.tensor(config["ssm_multipliers"]).repeat_interleave(torch.tensor(counts))
        factor = (each * config["ssm_in_multiplier"]).unsqueeze(1)
    return tensor / factor if back else tensor * factor


def add_hybrid(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the metadata of recurrent layers."""
    if config["model_type"] == "jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        layers, groups = range(num_layers_of(config)), config["num_key_value_heads"]
        writer.add_head_count_kv([groups * (index % period == offset) for index in layers])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        return writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
    if config["model_type"] in ("kimi_linear", "glm_moe_dsa"):
        return _add_latent(writer, config)
    kinds = config.get("layers_block_type") or config.get("layer_types") or []
    groups = config["num_key_value_heads"]
    by_layer = config["model_type"] in ("lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h")
    writer.add_head_count_kv([groups * (kind == "full_attention") for kind in kinds] if by_layer else groups)
    size = config["moe_intermediate_size"] if "moe" in kinds else config["intermediate_size"]
    if config["model_type"] == "nemotron_h" and "moe" not in kinds:
        writer.add_feed_forward_length([size * (kind == "mlp") for kind in kinds])
    elif config["model_type"] == "nemotron_h":
        writer.add_feed_forward_length([size * (kind in ("mlp", "moe")) for kind in kinds])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
    elif config["model_type"] == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_rope_scaling_finetuned(False)
        size = size if config["num_local_experts"] else config["shared_intermediate_size"]
        writer.add_feed_forward_length(size)
    elif config["model_type"] == "lfm2":
        multiple = config["block_multiple_of"]
        writer.add_feed_forward_length(-(-int(2 * size / 3) // multiple) * multiple)
    elif config["model_type"] != "qwen3_5_moe_text":
        writer.add_feed_forward_length(size)
    if config["model_type"] == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        return
    if config["model_type"].startswith("qwen3"):
        keys, repeats, key_dim, value_dim = _delta(config)
        width, inner, state, heads = (
            config["linear_conv_kernel_dim"], keys * repeats * value_dim, key_dim, keys * repeats
        )  # fmt: skip
        writer.add_full_attention_interval(4)
        group_count = keys
    else:
        prefix = "" if config["model_type"] == "nemotron_h" else "mamba_"
        heads = config.get("mamba_num_heads") or config["mamba_n_heads"]
        inner = config.get("mamba_d_ssm") or (
            heads * config["mamba_head_dim"] if prefix == "" else config["mamba_expand"] * config["hidden_size"]
        )
        width = config.get("conv_kernel") or config["mamba_d_conv"]
        state, group_count = config.get("ssm_state_size") or config["mamba_d_state"], _groups(config)
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(group_count)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)


def _add_latent(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the metadata of Kimi Linear and GLM 5."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_key_length(latent + rotated)
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] == "kimi_linear":
        writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(config["linear_head_dim"])
        writer.add_expert_group_count(config["num_expert_group"])
        return writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_head_count_kv(1)
    writer.add_value_length(latent)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    if "shared" in config["indexer_types"]:
        # Which this version of the library does not know.
        writer.add_array(f"{writer.arch}.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])


def add_without_attention(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the metadata of models of Mamba or Mamba-2 alone."""
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["state_size"])
    if config["model_type"] == "mamba2":
        writer.add_ssm_time_step_rank(config["num_heads"])
        return writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")
