"""Checkpoints that transformers cannot read, or does not write: other names and packings of weights that it can run.

A disguise rewrites the config and the tensors of a source checkpoint; the logits of the source are the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_server.layers.alibi import bloom_slopes

Config = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Disguise:
    """source: model type and variant. prepare: changes the source model itself before it computes and is saved."""

    source: tuple[str, str]
    change: Callable[[Config, Tensors], None]
    prepare: Callable[[Any], None] | None = None


def disguise(path: Path, change: Callable[[Config, Tensors], None]) -> None:
    """Rewrite config.json and model.safetensors in `path`."""
    config_file, weight_file = path / "config.json", path / "model.safetensors"
    config, tensors = json.loads(config_file.read_text()), load_file(weight_file)
    change(config, tensors)
    config_file.write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weight_file)


def _rename(config: Config, names: dict[str, str]) -> None:
    for old, new in names.items():
        config[new] = config.pop(old)


def _refined_web(config: Config, tensors: Tensors) -> None:
    """Falcon 40B's first config: other names, and nothing that tells the architecture but the model type."""
    config["model_type"] = "RefinedWeb"
    del config["new_decoder_architecture"], config["num_ln_in_parallel_attn"]
    _rename(config, {"num_kv_heads": "n_head_kv", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"})


def _refined_web_model(config: Config, tensors: Tensors) -> None:
    """Falcon 7B's and RW's first config."""
    config["model_type"] = "RefinedWebModel"
    for name in ("new_decoder_architecture", "num_ln_in_parallel_attn", "num_kv_heads"):
        del config[name]
    _rename(config, {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"})


def _baichuan(config: Config, tensors: Tensors) -> None:
    config["model_type"] = "baichuan"
    del config["num_key_value_heads"], config["head_dim"], config["rope_parameters"]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}.self_attn."
        parts = [tensors.pop(f"{prefix}{n}_proj.weight") for n in "qkv"]
        tensors[prefix + "W_pack.weight"] = torch.cat(parts)


def _baichuan_13b(config: Config, tensors: Tensors) -> None:
    _baichuan(config, tensors)
    config["model_max_length"] = config.pop("max_position_embeddings")


def _with_alibi(model: Any) -> None:
    """A Llama that does not rotate and biases its scores."""
    from transformers import AttentionInterface

    slopes = torch.tensor(bloom_slopes(model.config.num_attention_heads))

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        positions = torch.arange(key.shape[2])
        distances = (positions - positions.unsqueeze(1)).float()
        distances.masked_fill_(distances > 0, -torch.inf)
        scores = query @ key.transpose(2, 3) * scaling + slopes[:, None, None] * distances
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    def unrotated(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, model.config.head_dim)
        return torch.ones(shape), torch.zeros(shape)

    AttentionInterface.register("alibi_written_out", attend)
    model.set_attn_implementation("alibi_written_out")
    model.model.rotary_emb.forward = unrotated


def _santacoder(config: Config, tensors: Tensors) -> None:
    """SantaCoder as first published: GPT-2 with one key head, matrices stored [in, out], q apart from k and v."""
    config["model_type"] = "gpt2"
    config["attention_head_type"] = "multiquery"
    width = config["n_embd"]
    for name in list(tensors):
        if ".h." in name and tensors[name].dim() == 2:
            tensors[name] = tensors[name].t()
        if "c_attn" in name:
            packed = tensors.pop(name)
            tensors[name.replace("c_attn", "q_attn")] = packed[..., :width]
            tensors[name.replace("c_attn", "kv_attn")] = packed[..., width:]


def _without_prefix(config: Config, tensors: Tensors) -> None:
    """As the public files of GPT-2 and BLOOM are."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def _without_model_prefix(config: Config, tensors: Tensors) -> None:
    """As the public files of OPT-125m are: without `model.`."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def _published_kimi(config: Config, tensors: Tensors) -> None:
    """Kimi Linear as it was published: layers counted from 1, sizes in a block, dense layers with an `mlp`."""
    kinds, mlps = config.pop("layer_types"), config.pop("mlp_layer_types")
    config["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "num_heads": config.pop("linear_num_heads"),
        "head_dim": config.pop("linear_head_dim"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config |= {"first_k_dense_replace": mlps.count("dense"), "mla_use_nope": True, "moe_layer_freq": 1}
    config |= {"moe_router_activation_func": "sigmoid", "rope_theta": 10000.0, "rope_scaling": None, "head_dim": 72}
    for name in list(tensors):
        if ".layers.0.block_sparse_moe." in name:
            tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)


def _published_olmo_hybrid(config: Config, tensors: Tensors) -> None:
    """OLMo Hybrid as it was published: a convolution for each kind, and the norms of attention layers as OLMo 2's."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    for index, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{index}."
        if kind == "full_attention":
            written = tensors.pop(prefix + "feedforward_layer_norm.weight")
            tensors[prefix + "post_attention_layernorm.weight"] = written
        else:
            names = [f"{prefix}linear_attn.{one}_conv1d.weight" for one in "qkv"]
            whole = torch.cat([tensors[name] for name in names])
            tensors |= dict(zip(names, (whole[:keys], whole[keys : 2 * keys], whole[2 * keys :]), strict=True))


DISGUISES = {
    ("olmo_hybrid", "published"): Disguise(("olmo_hybrid", "plain"), _published_olmo_hybrid),
    ("kimi_linear", "published"): Disguise(("kimi_linear", "plain"), _published_kimi),
    ("RefinedWeb", "plain"): Disguise(("falcon", "plain"), _refined_web),
    ("RefinedWebModel", "plain"): Disguise(("falcon", "mqa"), _refined_web_model),
    ("RefinedWebModel", "alibi"): Disguise(("falcon", "alibi"), _refined_web_model),
    ("baichuan", "plain"): Disguise(("llama", "mha"), _baichuan),
    ("baichuan", "alibi"): Disguise(("llama", "mha"), _baichuan_13b, prepare=_with_alibi),
    ("bloom", "no_prefix"): Disguise(("bloom", "plain"), _without_prefix),
    ("gpt2", "no_prefix"): Disguise(("gpt2", "plain"), _without_prefix),
    ("gpt2", "santacoder"): Disguise(("gpt_bigcode", "plain"), _santacoder),
    ("opt", "no_prefix"): Disguise(("opt", "plain"), _without_model_prefix),
}
