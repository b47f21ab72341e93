"""Loads EAGLE-3 heads of SafeAILab's, vLLM's and SGLang's trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.features.drafts.drafters.eagle import EagleLayer
from model_server.features.drafts.drafters.layer_drafter import LayerDrafter
from model_server.layers.embedding import Embedding, vocab_range
from model_server.layers.fused.choice import fused_for
from model_server.layers.norm import AddNorm
from model_server.layers.rotary import Rotary
from model_server.models.config import ModelConfig
from model_server.models.decoder.attention.layers import attention_layers
from model_server.models.decoder.attention.multi_head import load_attention
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mlp import load_mlp
from model_server.models.decoder.spec import Spec
from model_server.models.decoder.vocabulary import head_over
from model_server.models.families import spec_of
from model_server.weights.matrix import Part
from model_server.weights.reader import SafetensorsReader

_PREFIXES = ("midlayer.", "layers.0.")


def load_eagle(
    fields: Mapping[str, Any],
    reader: SafetensorsReader,
    base_spec: Spec,
    base: Decoder,
    placement: Placement,
    attention: AttentionChoice,
) -> LayerDrafter:
    """Load EAGLE-3 for `base`, which keeps some layers' inputs from now on."""
    options = _options(fields)
    spec = _spec(options)
    loader = Loader(
        reader, placement.device, placement.ranks.tensor, spec.norm, spec.norm_eps,
        fused=fused_for(placement.device, placement.dtype),
    )  # fmt: skip
    size = spec.hidden_size
    if size != base_spec.hidden_size:
        raise StartupError(f"its hidden states have {size} numbers, the model's {base_spec.hidden_size}")
    if not loader.has("fc.weight"):
        raise StartupError("it has no tensor fc.weight: of EAGLE heads only those of EAGLE-3 are served")
    prefix = next((one for one in _PREFIXES if loader.has(one + "hidden_norm.weight")), None)
    if prefix is None:
        raise StartupError(f"weight {_PREFIXES[0]}hidden_norm.weight does not exist")
    layers = _kept_layers(options, base_spec.num_layers)
    backend = attention.for_layers(attention_layers(spec))
    if base.traits.attention is None or backend.block_size != base.traits.block_size:
        raise StartupError(
            f"its attention needs KV blocks of {backend.block_size} tokens, the model's {base.traits.block_size}"
        )
    part = load_attention(loader, spec, 0, prefix=prefix, input_size=2 * size)
    layer = EagleLayer(
        embed=_embedding(loader, base_spec, base, size),
        fc_norms=_fc_norms(loader, options, len(layers), size),
        fc=loader.column_linear([Part("fc", ((0, size),), size)], len(layers) * size, as_stored=True),
        input_norm=loader.norm(prefix + "input_layernorm", size),
        hidden_norm=loader.norm(prefix + "hidden_norm", size),
        attention=part,
        post_norm=loader.norm(prefix + "post_attention_layernorm", size),
        mlp=load_mlp(loader, spec, 0, prefix=prefix),
        norm=loader.norm("norm", size),
        head=head_over(loader, "lm_head", loader.reader.shape("lm_head.weight")[0], size),
        ids=_ids(loader, base_spec.vocab_size),
        norms_residual=options.get("norm_before_residual") is True,
        norms_output=options.get("norm_output") is True,
        rotaries=tuple(Rotary(rope, placement.device) for rope in loader.ropes),
        backend=backend,
        group=placement.ranks.tensor,
        hidden_size=size,
        max_positions=base_spec.max_positions,
    )
    base.keep_inputs(layers)
    return LayerDrafter(layer, loader.weight_bytes)


def _options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Join the config's fields, which some writers nest."""
    found = dict(fields)
    for name in ("transformer_layer_config", "eagle_config"):
        inner = fields.get(name)
        if isinstance(inner, dict):
            found |= inner
    return found


def _spec(options: Mapping[str, Any]) -> Spec:
    """Describe the layer, Llama's unless the config says otherwise."""
    fields = {**options, "num_hidden_layers": 1, "tie_word_embeddings": False}
    if (
        not isinstance(fields.get("model_type"), str)
        or "eagle" in fields["model_type"]
        or "spec" in fields["model_type"]
    ):
        fields["model_type"] = "llama"
    spec = spec_of(ModelConfig(fields))
    if spec.attention is not None or spec.block != "sequential" or any(one is not None for one in spec.mlps):
        raise StartupError(f"EAGLE-3 heads with a layer of {fields['model_type']} are not served")
    return spec


def _kept_layers(options: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the model's layers whose inputs it reads."""
    asked = options.get("eagle_aux_hidden_state_layer_ids")
    layers = [2, num_layers // 2, num_layers - 3] if asked is None else asked
    good = isinstance(layers, list) and layers and all(type(one) is int and 0 <= one < num_layers for one in layers)
    if not good or len(set(layers)) != len(layers):
        raise StartupError(
            f"config.json: it reads the inputs of layers {str(layers)[:100]}, which the model with its {num_layers} "
            "layers does not have"
        )
    return tuple(layers)


def _fc_norms(loader: Loader, options: Mapping[str, Any], number: int, size: int) -> tuple[AddNorm, ...]:
    """Load the norms before `fc`: one of all, or one of each."""
    if options.get("fc_norm") is True:
        return tuple(loader.norm(f"fc_norm.{place}", size) for place in range(number))
    return (loader.norm("input_norm", number * size),) if options.get("norm_before_fc") is True else ()


def _embedding(loader: Loader, base_spec: Spec, base: Decoder, size: int) -> Any:
    """Its own, or the model's."""
    if not loader.has("embed_tokens.weight"):
        if base_spec.names.positions is not None or base_spec.names.embedding_norm is not None:
            raise StartupError("it has no tensor embed_tokens.weight, and the model's embedding is of another kind")
        return base.embed
    rows = loader.reader.shape("embed_tokens.weight")[0]
    if rows < base_spec.vocab_size:
        raise StartupError(f"weight embed_tokens.weight has {rows} rows, the model {base_spec.vocab_size} ids")
    start, stop = vocab_range(rows, loader.tensor_group)
    return Embedding(loader.rows("embed_tokens.weight", [(start, stop)], size), start, loader.tensor_group)


def _ids(loader: Loader, vocab_size: int) -> Tensor | None:
    """Return the model's ids of the draft vocabulary, stored as differences `d2t`."""
    number = loader.reader.shape("lm_head.weight")[0]
    if not loader.has("d2t"):
        if number > vocab_size:
            raise StartupError(
                f"weight lm_head.weight has {number} rows, the model {vocab_size} ids, and there is no d2t"
            )
        return None
    differences = loader.reader.raw("d2t").long()
    if differences.shape != (number,):
        raise StartupError(f"weight d2t has shape {list(differences.shape)}, lm_head.weight {number} rows")
    ids = torch.arange(number, device=differences.device) + differences
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise StartupError(f"weight d2t leads to id {int(ids.max())}, the model has {vocab_size}")
    return ids
