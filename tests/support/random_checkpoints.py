"""Checkpoints of a chosen size to be loaded, whose numbers are random (`random_weights`).

They have few layers and large matrices, sharded over several files with an index: what is held beside the weights while
they are read shows best there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors.torch import save_file
from support.random_weights import FORMATS, GGUF_HALVES, Tensors, bits, small
from torch import Tensor

from model_server.weights.gguf.config import config_of
from model_server.weights.gguf.header import BLOCKS, read_gguf
from wire.quantization.gguf import WEIGHTS

_VOCAB_SIZE = 8192
_FIELDS = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
_EXPERTS: dict[str, Any] = {
    "intermediate_size": 2048, "num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 128,
    "sliding_window": 128, "hidden_act": "silu", "attention_bias": True,
}  # fmt: skip
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "arcee": "ArceeForCausalLM", "gpt_oss": "GptOssForCausalLM"}


def write_checkpoint(
    folder: Path,
    megabytes: int,
    *,
    dtype: str = "float32",
    files: int = 4,
    method: str | None = None,
    inner: int = 5632,
    model_type: str = "llama",
) -> Path:
    """A checkpoint of about that size in `folder`.

    method: of FORMATS: how the layers' matrices are stored; None: plain, in `dtype`. inner: the width of the MLPs.
    model_type: `llama`, `arcee`, which transformers computes, or `gpt_oss`, whose experts are stored in mxfp4.
    """
    width, table = _FIELDS["hidden_size"], small(dtype, _VOCAB_SIZE, _FIELDS["hidden_size"])
    layer = _layer_of_experts() if model_type == "gpt_oss" else _layer(dtype, method, inner, model_type == "llama")
    num_layers = _num_layers(megabytes, layer, table)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **_FIELDS, "intermediate_size": inner, "model_type": model_type, "num_hidden_layers": num_layers,
        "vocab_size": _VOCAB_SIZE, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "dtype": dtype, "architectures": [_ARCHITECTURES[model_type]],
    }  # fmt: skip
    if model_type == "gpt_oss":
        config |= _EXPERTS | {"quantization_config": {"quant_method": "mxfp4"}}
        config["layer_types"] = ["full_attention"] * num_layers
    if method is not None:
        config["quantization_config"] = FORMATS[method][0]
    (folder / "config.json").write_text(json.dumps(config))
    layers = [{f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()} for i in range(num_layers)]
    ends = {"lm_head.weight": table, "model.norm.weight": small(dtype, width)}
    parts = [{"model.embed_tokens.weight": table}, *layers, ends]
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        tensors = {name: tensor.clone() for part in parts[number::files] for name, tensor in part.items()}
        weight_map |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_gguf(folder: Path, megabytes: int, kind: str, inner: int = 5632) -> Path:
    """A llama of about that size as the download step leaves it, without a tokenizer: the file, all of whose matrices
    are of the type `kind`, and its config."""
    width = _FIELDS["hidden_size"]
    length, size = BLOCKS[kind]

    def blocks(num_rows: int, num_columns: int) -> Tensor:
        made = bits(torch.uint8, num_rows, num_columns // length, size)
        for at in GGUF_HALVES.get(kind, (0,)):
            made[..., at : at + 2] = torch.tensor([1e-3]).half().view(torch.uint8)
        return made.flatten(1)

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    layer = {names[name]: blocks(*shape) for name, shape in _matrices(inner, gated=True).items()}
    table = blocks(_VOCAB_SIZE, width)
    num_layers = _num_layers(megabytes, layer, table)
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / WEIGHTS, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(_FIELDS["num_attention_heads"])
    writer.add_head_count_kv(_FIELDS["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    matrices = {"token_embd": table, "output": table}
    matrices |= {f"blk.{i}.{name}": tensor for i in range(num_layers) for name, tensor in layer.items()}
    for name, tensor in matrices.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
    norms = [f"blk.{i}.{name}" for i in range(num_layers) for name in ("attn_norm", "ffn_norm")]
    for name in ("output_norm", *norms):
        writer.add_tensor(f"{name}.weight", numpy.ones(width, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = config_of(read_gguf(folder / WEIGHTS), folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _num_layers(megabytes: int, layer: Tensors, table: Tensor) -> int:
    budget = megabytes * 10**6 - 2 * table.nbytes
    return max(round(budget / sum(tensor.nbytes for tensor in layer.values())), 2)


def _matrices(inner: int, *, gated: bool) -> dict[str, tuple[int, int]]:
    """Of one layer: outputs and inputs."""
    width = _FIELDS["hidden_size"]
    keys = width // _FIELDS["num_attention_heads"] * _FIELDS["num_key_value_heads"]
    return {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        **({"mlp.gate_proj": (inner, width)} if gated else {}),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }


def _layer(dtype: str, method: str | None, inner: int, gated: bool) -> Tensors:
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {f"{norm}.weight": small(dtype, _FIELDS["hidden_size"]) for norm in norms}
    for name, shape in _matrices(inner, gated=gated).items():
        stored = {"weight": small(dtype, *shape)} if method is None else FORMATS[method][1](*shape)
        tensors |= {f"{name}.{end}": tensor for end, tensor in stored.items()}
    return tensors


def _layer_of_experts() -> Tensors:
    """Of gpt_oss, whose plain tensors are bfloat16."""
    width, heads, groups = (_FIELDS[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    inner, count, size = (_EXPERTS[n] for n in ("intermediate_size", "num_local_experts", "head_dim"))
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.sinks": (heads,),
        "mlp.router.weight": (count, width),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj_bias": (count, width),
    }
    wide, narrow = heads * size, groups * size
    for name, rows, columns in (("q", wide, width), ("k", narrow, width), ("v", narrow, width), ("o", width, wide)):
        shapes |= {f"self_attn.{name}_proj.weight": (rows, columns), f"self_attn.{name}_proj.bias": (rows,)}
    tensors = {name: small("bfloat16", *shape) for name, shape in shapes.items()}
    for name, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
        tensors[f"mlp.experts.{name}_blocks"] = bits(torch.uint8, count, rows, columns // 32, 16)
        tensors[f"mlp.experts.{name}_scales"] = bits(torch.uint8, count, rows, columns // 32) % 16 + 110
    return tensors
