"""Encoders: BERT and the like, with norms behind the sums; ModernBERT, EuroBERT."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds, rotary_dim, windows_of

# From a config and the names of the stored tensors.
Encoder = Callable[[ModelConfig, Collection[str]], Spec | None]


def _bert_names(prefix: str, **differences: Any) -> Names:
    plain = Names(
        base=prefix,
        embedding=prefix + "embeddings.word_embeddings",
        positions=prefix + "embeddings.position_embeddings",
        token_types=prefix + "embeddings.token_type_embeddings",
        embedding_norm=prefix + "embeddings.LayerNorm",
        layers=prefix + "encoder.layer",
        attention_norm="attention.output.LayerNorm",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        mlp_norm="output.LayerNorm",
        up=("intermediate.dense",),
        down="output.dense",
        norm=None,
    )
    return replace(plain, **differences)


DISTILBERT = Names(
    base="distilbert.",
    embedding="distilbert.embeddings.word_embeddings",
    positions="distilbert.embeddings.position_embeddings",
    embedding_norm="distilbert.embeddings.LayerNorm",
    layers="distilbert.transformer.layer",
    attention_norm="sa_layer_norm",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    mlp_norm="output_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    norm=None,
)
MODERNBERT = Names(
    embedding="model.embeddings.tok_embeddings",
    embedding_norm="model.embeddings.norm",
    attention_norm="attn_norm",
    qkv=("attn.Wqkv",),
    output="attn.Wo",
    mlp_norm="mlp_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    norm="model.final_norm",
)


def _rotary_names(prefix: str) -> Names:
    """Return transformers' names of encoders that rotate."""
    return Names(
        base=prefix,
        embedding=prefix + "embeddings.word_embeddings",
        token_types=prefix + "embeddings.token_type_embeddings",
        embedding_norm=prefix + "embeddings.LayerNorm",
        layers=prefix + "layers",
        attention_norm="post_attention_layernorm",
        mlp_norm="post_mlp_layernorm",
        norm=None,
    )


# As the authors' own code writes them.
NOMIC = replace(
    _rotary_names("bert."),
    embedding_norm="bert.emb_ln",
    layers="bert.encoder.layers",
    attention_norm="norm1",
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    mlp_norm="norm2",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
)
NEW = replace(
    _rotary_names("new."),
    layers="new.encoder.layer",
    attention_norm="attn_ln",
    qkv=("attention.qkv_proj",),
    output="attention.o_proj",
    mlp_norm="mlp_ln",
    up=("mlp.up_gate_proj",),
)


def _post_norm(config: ModelConfig, names: Names, **differences: Any) -> Spec:
    """BERT's blocks. The defaults are its own."""
    num_layers = config.count("num_hidden_layers", 12)
    fields: dict[str, Any] = {
        "names": names,
        "block": "post",
        "norm": "layer",
        "gated": False,
        "ropes": (None,) * num_layers,
        "bidirectional": True,
        "has_head": False,
    }
    return base(
        config.renamed({"rms_norm_eps": "layer_norm_eps"}, num_hidden_layers=num_layers),
        default_positions=512,
        default_eps=1e-12,
        default_activation="gelu",
        tied=True,
        **(fields | differences),
    )


def _is_plain(config: ModelConfig) -> bool:
    """Whether positions are learned and all text is seen, unlike some older files."""
    return config.text("position_embedding_type", "absolute") == "absolute" and not config.flag("is_decoder", False)


def bert(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Learned positions and token types."""
    return _post_norm(config, _bert_names("bert.")) if _is_plain(config) else None


def electra(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Describe ELECTRA as BERT; small ones, with widened embeddings, are left to transformers."""
    narrow = config.count("embedding_size", 128) != config.count("hidden_size", 256)
    return None if narrow or not _is_plain(config) else _post_norm(config, _bert_names("electra."))


def roberta(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Describe RoBERTa, XLM-R, CamemBERT: BERT with positions behind the padding's id."""
    if not _is_plain(config):
        return None
    offset = config.number("pad_token_id", 1) + 1 if config.get("pad_token_id") != 0 else 1
    positions = config.count("max_position_embeddings", 512) - int(offset)
    config = config.replaced(max_position_embeddings=positions)
    return _post_norm(config, _bert_names("roberta."), position_offset=int(offset))


def distilbert(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Describe DistilBERT: BERT without token types, in its own words."""
    if config.flag("sinusoidal_pos_embds", False) and not any("position_embeddings" in name for name in stored):
        return None
    config = config.renamed(
        {
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        dim=768,
        n_heads=12,
        n_layers=6,
        hidden_dim=3072,
    )
    return _post_norm(config, DISTILBERT, norm_eps=1e-12)


def nomic_bert(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Describe Nomic's BERT: rotation, gated MLP; its authors' files use GPT-2's words."""
    if config.get("num_experts") or config.flag("causal", False) or config.flag("prenorm", False):
        return None
    config = config.renamed(
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": ("max_position_embeddings", "n_positions"),
            "rope_theta": "rotary_emb_base",
        },
        hidden_act="silu",
    )
    names = NOMIC if _has(stored, "attn.Wqkv") else _rotary_names("nomic_bert.")
    activation = "silu" if config.text("activation_function", "swiglu") == "swiglu" else ""
    return _rotating(config, names, theta=1000.0, activation=config.text("hidden_act", "silu") if activation else "")


def gte(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Describe GTE multilingual, also as `new`: rotation, gated MLP."""
    if config.text("position_embedding_type", "rope") != "rope" or config.flag("logn_attention_scale", False):
        return None
    authors = _has(stored, "attention.qkv_proj")
    names = NEW if authors else _rotary_names("gte.")
    if not any("token_type_embeddings" in name for name in stored):
        names = replace(names, token_types=None)
    return _rotating(
        config, names, theta=160_000.0, activation=config.text("hidden_act", "gelu"), up_before_gate=authors
    )


def _rotating(config: ModelConfig, names: Names, *, theta: float, activation: str, **differences: Any) -> Spec | None:
    if not activation:
        return None
    dim = config.count("hidden_size") // config.count("num_attention_heads")
    positions = config.count("max_position_embeddings", 8192)
    rope = config.rope(rotary_dim(config, dim, 1.0), positions, theta=theta)
    ropes = (rope,) * config.count("num_hidden_layers")
    return _post_norm(config, names, ropes=ropes, gated=True, activation=activation, **differences)


def modernbert(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Describe ModernBERT: norms before the sums, rotation, gated MLP, two-sided windows on most layers."""
    config = config.renamed(
        {"hidden_act": "hidden_activation", "rms_norm_eps": "norm_eps"},
        hidden_activation="gelu",
        norm_eps=1e-5,
    )
    num_layers = config.count("num_hidden_layers")
    every = config.count("global_attn_every_n_layers", 3)
    kinds = layer_kinds(config, ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)])
    positions = config.count("max_position_embeddings", 8192)
    dim = config.count("hidden_size") // config.count("num_attention_heads")
    block = config.rope_block()
    ropes = {}
    for kind, name, theta in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        own = block.get(kind) if isinstance(block.get(kind), dict) else {"rope_theta": config.number(name, theta)}
        ropes[kind] = config.rope(dim, positions, theta=theta, block=own)
    return base(
        config,
        default_positions=8192,
        default_activation="gelu",
        tied=True,
        names=MODERNBERT,
        norm="layer",
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=windows_of(kinds, config.count("local_attention", 128) // 2 + 1),
        first_norm=False,
        bidirectional=True,
        has_head=False,
    )


def eurobert(config: ModelConfig, stored: Collection[str]) -> Spec | None:
    """Describe EuroBERT: Llama's blocks that see all text."""
    plain = base(config, default_positions=8192, default_eps=1e-5)
    return replace(plain, bidirectional=True, has_head=False)


def _has(stored: Collection[str], part: str) -> bool:
    return any(part in name for name in stored)


ENCODERS: dict[str, Encoder] = {
    "bert": bert,
    "camembert": roberta,
    "distilbert": distilbert,
    "electra": electra,
    "eurobert": eurobert,
    "gte": gte,
    "modernbert": modernbert,
    "new": gte,
    "nomic_bert": nomic_bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
}
