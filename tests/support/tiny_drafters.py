"""Random heads that draft for a tiny model, in the folders that their trainers write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_checkpoint
from torch import Tensor


class RandomTensors:
    """Tensors of a seed, by the names under which they are stored."""

    def __init__(self, seed: int, scale: float = 0.3) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale

    def add(self, name: str, *shape: int, offset: float = 0.0) -> None:
        self.tensors[name] = torch.randn(shape, generator=self._generator) * self._scale + offset


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    return path


def base_with_two_drafters(root: Path, number: int, **eagle: Any) -> Path:
    """`root` with a model of four layers (`base`), `number` Medusa heads (`medusa`) and an EAGLE-3 layer (`eagle`)."""
    tiny_checkpoint("llama", root / "base", num_hidden_layers=4, vocab_size=320)
    medusa(root / "medusa", number=number)
    eagle3(root / "eagle", **eagle)
    return root


def medusa(
    path: Path, *, version: int = 1, number: int = 4, layers: int = 2, hidden: int = 64, vocab: int = 320,
    seed: int = 0, base: str | None = None, heads: list[Tensor] | None = None,
) -> Path:  # fmt: skip
    """heads: matrices over the vocabulary instead of random ones, behind residual layers that add nothing."""
    made = RandomTensors(seed)
    for head in range(number):
        for layer in range(layers if version == 1 else 1):
            made.add(f"{head}.{layer}.linear.weight", hidden, hidden)
            made.add(f"{head}.{layer}.linear.bias", hidden)
        if version == 1:
            made.add(f"{head}.{layers}.weight", vocab, hidden)
    if heads is not None:
        for name, tensor in made.tensors.items():
            tensor.zero_() if ".linear." in name else tensor.copy_(heads[int(name.partition(".")[0])])
    config: dict[str, Any] = {"medusa_num_heads": number, "medusa_num_layers": layers if version == 1 else 1}
    if base is not None:
        config["base_model_name_or_path"] = base
    return write_folder(path, config, made.tensors, "medusa_lm_head.safetensors")


def mlp_speculator(
    path: Path, *, number: int = 3, inner: int = 48, hidden: int = 64, vocab: int = 320, tied: bool = False,
    scales_input: bool = False, seed: int = 0, base: str | None = None,
) -> Path:  # fmt: skip
    made = RandomTensors(seed)
    for place in range(number):
        if not tied or place < 2:
            made.add(f"speculator.proj.{place}.weight", inner, inner if place else hidden)
        if not tied or place < 1:
            made.add(f"speculator.emb.{place}.weight", vocab, inner)
            made.add(f"speculator.ln.{place}.weight", inner, offset=1.0)
            made.add(f"speculator.ln.{place}.bias", inner)
            made.add(f"speculator.head.{place}.weight", vocab, inner)
    config: dict[str, Any] = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": hidden,
        "inner_dim": inner, "n_predict": number, "tie_weights": tied, "scale_input": scales_input, "vocab_size": vocab,
    }  # fmt: skip
    if base is not None:
        config["base_model_name_or_path"] = base
    return write_folder(path, config, made.tensors, "model.safetensors")


def eagle3(
    path: Path, *, hidden: int = 64, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, inner: int = 96,
    vocab: int = 320, draft_vocab: int | None = 100, states: int = 3, seed: int = 0, prefix: str = "midlayer.",
    nested: bool = False, **options: Any,
) -> Path:  # fmt: skip
    """draft_vocab: of every third id; None: of all, without `d2t`. nested: as vLLM's trainer writes the config."""
    made = RandomTensors(seed, 0.15)
    for name, rows, columns in (
        ("q", heads * head_dim, 2 * hidden), ("k", kv_heads * head_dim, 2 * hidden),
        ("v", kv_heads * head_dim, 2 * hidden), ("o", hidden, heads * head_dim),
    ):  # fmt: skip
        made.add(f"{prefix}self_attn.{name}_proj.weight", rows, columns)
    made.add(f"{prefix}mlp.gate_proj.weight", inner, hidden)
    made.add(f"{prefix}mlp.up_proj.weight", inner, hidden)
    made.add(f"{prefix}mlp.down_proj.weight", hidden, inner)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made.add(f"{prefix}{name}.weight", hidden, offset=1.0)
    made.add("norm.weight", hidden, offset=1.0)
    made.add("fc.weight", hidden, states * hidden)
    made.add("lm_head.weight", draft_vocab or vocab, hidden)
    if options.get("norm_before_fc"):
        made.add("input_norm.weight", states * hidden, offset=1.0)
    for place in range(states if options.get("fc_norm") else 0):
        made.add(f"fc_norm.{place}.weight", hidden, offset=1.0)
    if options.pop("own_embedding", False):
        made.add("embed_tokens.weight", vocab, hidden)
    if draft_vocab is not None:
        made.tensors["d2t"] = 2 * torch.arange(draft_vocab) + 1  # 1, 4, 7, ...
    layer = {
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "intermediate_size": inner, "num_hidden_layers": 1, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu",
    }  # fmt: skip
    config: dict[str, Any] = {**layer, "architectures": ["LlamaForCausalLMEagle3"], **options}
    if nested:
        config = {
            "architectures": ["Eagle3Speculator"], "model_type": "speculators", "transformer_layer_config": layer,
            "speculators_model_type": "eagle3", **options,
        }  # fmt: skip
    return write_folder(path, config, made.tensors, "model.safetensors")


def with_mtp(path: Path, *, copies_head: bool = True) -> Path:
    """Makes the last layer of a tiny model in `path` its MTP layer, as DeepSeek stores it: the model has one less. Of a
    vision model, of its text model.

    copies_head: embedding and head of the layer are the model's, else of its own.
    """
    whole = json.loads((path / "config.json").read_text())
    config = whole.get("text_config", whole)
    layer = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    config["num_nextn_predict_layers"] = 1
    for kinds in {"layer_types", "mlp_layer_types"} & config.keys():
        config[kinds] = config[kinds][:layer]
    (path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    embedding, hidden = tensors[name], config["hidden_size"]
    made, prefix = RandomTensors(3, 0.15), f"{name.removesuffix('embed_tokens.weight')}layers.{layer}."
    made.add(prefix + "eh_proj.weight", hidden, 2 * hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        made.add(f"{prefix}{norm}.weight", hidden, offset=1.0)
    made.add(prefix + "embed_tokens.weight", *embedding.shape)
    made.add(prefix + "shared_head.head.weight", *embedding.shape)
    if copies_head:
        made.tensors[prefix + "embed_tokens.weight"] = embedding.clone()
        made.tensors[prefix + "shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    save_file(tensors | made.tensors, path / "model.safetensors", {"format": "pt"})
    return path
