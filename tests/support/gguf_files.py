"""GGUF files of tiny models, written with the gguf library as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from support.gguf_hybrids import (
    HYBRIDS,
    PLAIN,
    WITHOUT_ATTENTION,
    Move,
    add_hybrid,
    add_without_attention,
    architecture_of,
    hybrid_moves,
    joined_experts,
    num_experts_of,
    num_layers_of,
    stack,
)
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "smollm3": "smollm3", "olmo2": "olmo2", "granite": "granite",
    "cohere": "command-r", "cohere2": "cohere2", "starcoder2": "starcoder2", "stablelm": "stablelm", "glm4": "glm4",
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe",
}  # fmt: skip
# What a file's quantization is called -> the types of its matrices; the last one is that of v, down and the head.
MIXTURES = {"Q8_0": ("Q8_0", "Q8_0"), "Q4_0": ("Q4_0", "Q4_0"), "Q4_K_M": ("Q4_K", "Q6_K"), "F16": ("F16", "F16")}
_RMS_NORMS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
_ROTATED_PAIRS = ("llama", "smollm3", "granite")
_BETTER = ("attn_v", "ffn_down", "output", "token_embd")


def write_gguf(source: Path, file: Path, mixture: str, decoded: Path | None = None, *, most_tensors: int = 0) -> Path:
    """The checkpoint in `source` as a GGUF file. decoded: a copy of it with the numbers that the library reads.

    most_tensors: of a part; 0: of any number.
    """
    config = json.loads((source / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"]) or architecture_of(config)
    architecture = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[name]
    writer = GGUFWriter(file, name, split_max_tensors=most_tensors)
    _add_config(writer, config)
    _add_tokenizer(writer, source)
    names = gguf.get_tensor_name_map(architecture, num_layers_of(config))
    read = {}
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    is_hybrid = config["model_type"] in HYBRIDS
    for move in hybrid_moves(tensors, config, names) if is_hybrid else _moves(tensors, config, names, name):
        found = []
        for theirs, tensor in zip(move.theirs, move.convert(*(tensors[one] for one in move.ours)), strict=True):
            stored, kind = _stored(tensor, theirs, mixture)
            writer.add_tensor(theirs, stored, raw_dtype=kind)
            found.append(torch.from_numpy(gguf.quants.dequantize(stored, kind).copy()).reshape(tensor.shape))
        read |= {one: tensor.contiguous() for one, tensor in zip(move.ours, move.back(*found), strict=True)}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if decoded is not None:
        shutil.copytree(source, decoded)
        save_file(read, decoded / "model.safetensors", metadata={"format": "pt"})
    return min(file.parent.glob(f"{file.stem}-00001-of-*.gguf"), default=file)


def _moves(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], names: gguf.TensorNameMap, architecture: str
) -> Iterator[Move]:
    for joined, ours in joined_experts(tensors).items():
        asked = joined.replace("correction_bias", "correction.bias")
        theirs = names.get_name(asked, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, joined
        if ours != [joined]:
            yield stack(ours, theirs)
            continue
        yield Move(
            [joined],
            [theirs],
            lambda one, to=theirs: [_as_theirs(one, to, architecture, config)],
            lambda one, to=theirs: [_as_ours(one, to, architecture, config)],
        )


def quantized(rows: numpy.ndarray, kind: str) -> numpy.ndarray:
    """[n, k] float32 -> [n, bytes] uint8; of the types with groups that the library cannot write, the nearest below."""
    if kind not in ("Q4_K", "Q6_K"):
        return numpy.asarray(gguf.quants.quantize(rows, GGMLQuantizationType[kind]))
    blocks = rows.reshape(-1, 256)
    packed = _q4_k(blocks) if kind == "Q4_K" else _q6_k(blocks)
    return packed.reshape(len(rows), -1)


def _q4_k(blocks: numpy.ndarray) -> numpy.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    least = numpy.maximum(-groups.min(-1), 0)
    scales = (groups.max(-1) + least) / 15
    d, dmin = (numpy.maximum(v.max(-1, keepdims=True) / 63, 1e-6).astype(numpy.float16) for v in (scales, least))
    sc, mn = (numpy.round(v / f.astype(numpy.float32)).astype(numpy.uint8) for v, f in ((scales, d), (least, dmin)))
    steps = numpy.maximum(d.astype(numpy.float32) * sc, 1e-9)[..., None]
    codes = numpy.clip(numpy.round((groups + (dmin.astype(numpy.float32) * mn)[..., None]) / steps), 0, 15)
    pairs = codes.astype(numpy.uint8).reshape(-1, 4, 2, 32)
    first, last = sc[:, :4], sc[:, 4:]
    low, high = mn[:, :4], mn[:, 4:]
    bits = [first | last >> 4 << 6, low | high >> 4 << 6, last & 15 | (high & 15) << 4]
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return numpy.concatenate([d.view(numpy.uint8), dmin.view(numpy.uint8), *bits, nibbles], -1)


def _q6_k(blocks: numpy.ndarray) -> numpy.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scales = numpy.abs(groups).max(-1) / 31
    d = numpy.maximum(scales.max(-1, keepdims=True) / 127, 1e-6).astype(numpy.float16)
    sc = numpy.round(scales / d.astype(numpy.float32)).astype(numpy.int8)
    steps = numpy.maximum(d.astype(numpy.float32) * sc, 1e-9)[..., None]
    codes = (numpy.clip(numpy.round(groups / steps), -32, 31) + 32).astype(numpy.uint8).reshape(-1, 2, 4, 32)
    lower = [codes[:, :, i] & 15 | (codes[:, :, i + 2] & 15) << 4 for i in (0, 1)]
    upper = [codes[:, :, i] >> 4 << 2 * i for i in range(4)]
    ql = numpy.stack(lower, 2).reshape(-1, 128)
    qh = (upper[0] | upper[1] | upper[2] | upper[3]).reshape(-1, 64)
    return numpy.concatenate([ql, qh, sc.view(numpy.uint8), d.view(numpy.uint8)], -1)


def _stored(values: Tensor, name: str, mixture: str) -> tuple[numpy.ndarray, GGMLQuantizationType]:
    # As llama.cpp keeps norms, routers and convolutions.
    is_plain = values.dim() < 2 or any(one in name for one in PLAIN)
    if "ffn_gate_inp_shexp" in name:
        values = values.squeeze(0)
    kind = "F32" if is_plain else MIXTURES[mixture][any(f"{one}." in name for one in _BETTER)]
    if kind == "F32":
        return values.numpy(), GGMLQuantizationType.F32
    if kind == "F16":
        return values.half().numpy(), GGMLQuantizationType.F16
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
        kind = "Q8_0"  # as llama.cpp does
    if values.shape[-1] % 32:
        return values.half().numpy(), GGMLQuantizationType.F16
    rows = quantized(values.flatten(0, -2).numpy(), kind)
    return rows.reshape(*values.shape[:-1], -1), GGMLQuantizationType[kind]


def _as_theirs(tensor: Tensor, name: str, architecture: str, config: Mapping[str, Any]) -> Tensor:
    if architecture in _ROTATED_PAIRS and (heads := _heads(name, config)):
        rows = tensor.view(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return rows.swapaxes(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else tensor


def _as_ours(tensor: Tensor, name: str, architecture: str, config: Mapping[str, Any]) -> Tensor:
    if architecture in _ROTATED_PAIRS and (heads := _heads(name, config)):
        rows = tensor.view(heads, len(tensor) // heads // 2, 2, *tensor.shape[1:])
        return rows.swapaxes(1, 2).reshape(tensor.shape)
    return tensor - 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else tensor


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    if "attn_q." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "attn_k." in name else None


def _add_config(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    if config["model_type"] in WITHOUT_ATTENTION:
        return add_without_attention(writer, config)
    rope = config.get("rope_parameters") or {}
    theta = rope.get("full_attention", rope).get("rope_theta", 10000.0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config.get("max_position_embeddings") or config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(num_layers_of(config))
    if config["model_type"] not in HYBRIDS:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config["model_type"] not in HYBRIDS:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if config["model_type"] not in ("kimi_linear", "glm_moe_dsa"):
        writer.add_key_length(head_dim)
    if config["model_type"] != "glm_moe_dsa":
        writer.add_value_length(head_dim)
    if (epsilon := next((config[one] for one in _RMS_NORMS if one in config), None)) is not None:
        writer.add_layer_norm_rms_eps(epsilon)
    else:
        writer.add_layer_norm_eps(config.get("norm_epsilon", config.get("layer_norm_eps")))
    if config["model_type"] in HYBRIDS:
        add_hybrid(writer, config)
    writer.add_rope_freq_base(theta)
    _add_particular(writer, config, head_dim)
    scaling = rope.get("full_attention", rope)
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if "sliding_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_particular(writer: GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    """What one architecture has, as llama.cpp's converter writes it."""
    if config["model_type"] in ("granite", "granitemoehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config["model_type"] == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        writer.add_rope_dimension_count(int(head_dim * share))
    if experts := num_experts_of(config):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["num_experts_per_token"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "glm4_moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_tokenizer(writer: GGUFWriter, source: Path) -> None:
    """A byte-level tokenizer.json, whose special tokens come first."""
    file, settings = (json.loads((source / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config"))
    vocabulary = file["model"]["vocab"]
    special = {token["content"] for token in file["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in file["model"]["merges"]])
    writer.add_bos_token_id(vocabulary[settings["bos_token"]])
    writer.add_eos_token_id(vocabulary[settings["eos_token"]])
    writer.add_add_bos_token(True)
    writer.add_chat_template(settings["chat_template"])
