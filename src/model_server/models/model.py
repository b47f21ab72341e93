"""A checkpoint and what its config says, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from model_server.adapters.folder import Adapter, read_adapter
from model_server.adapters.merge import with_tied_rows
from model_server.adapters.product_slots import SlotSizes
from model_server.attention.choice import KEEP_MODEL_TYPE
from model_server.cpp import library as cpp
from model_server.errors import StartupError
from model_server.kernels.availability import has_float8, refusal
from model_server.models.config import CROSSING, ModelConfig
from model_server.models.decoder.expert_stores import SeparateExperts, StackedExperts
from model_server.models.decoder.experts_beside import ExpertsBeside
from model_server.models.decoder.mixers.gated_delta import GatedDeltaSpec
from model_server.models.decoder.mixers.kimi_delta import KimiDeltaSpec
from model_server.models.decoder.mixers.short_conv import ShortConvSpec
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.products import model_products
from model_server.models.decoder.spec import MlpSpec, Spec
from model_server.models.families import pooled_spec_of, spec_of
from model_server.models.families.base import UnknownFamilyError
from model_server.models.families.vision import BASES, OUTER_NAMES, TEXT_TYPES, is_of_tower, text_config, text_names
from model_server.models.stated_parts import check_layers_alike, check_stated_parts
from model_server.models.tying import with_stored_head
from model_server.quantization.kv_cache import DTYPES
from model_server.quantization.scheme import Scheme, resolve
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.header import Header
from model_server.weights.leftover import check_leftover
from model_server.weights.products import Products
from wire.images.families import family_name
from wire.quantization.config import wants_float8_cache

logger = logging.getLogger(__name__)

# What names begin with in files -> in transformers, and so in adapters, where these differ.
_OF_LIBRARY = {"backbone.": ("model.",)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A described checkpoint."""

    checkpoint: Checkpoint
    # What messages call it.
    name: str
    config: ModelConfig
    # None for a family that only transformers may compute.
    spec: Spec | None
    scheme: Scheme = dataclasses.field(default_factory=Scheme)
    # Loaded with it.
    adapters: tuple[Adapter, ...] = ()
    # Merged into the weights of `spec`.
    merged: Adapter | None = None
    # For adapters that come while serving.
    adapter_room: int = 0
    # None: any that is read.
    max_adapter_rank: int | None = None
    # Of the device's adapters; None: rows use them where loaded.
    slots: SlotSizes | None = None
    # By name, for a model without a spec.
    adapter_folders: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    # What of `spec` takes adapters; None: nothing.
    targets: Products | None = None
    # On the files, for the operator.
    warnings: tuple[str, ...] = ()


def describe(
    checkpoint: Checkpoint, *, rope_factor: float | None = None, quantize: str | None = None, name: str | None = None
) -> Model:
    """Describe what `checkpoint` holds.

    Args:
        rope_factor: Divides positions instead of the config's scaling.
        quantize: `--quantize`.
        name: None: its folder.
    """
    name = name or str(checkpoint.directory)
    scheme = resolve(checkpoint, quantize, name)
    if checkpoint.merged is not None and scheme.method is not None and scheme.quantize is None:
        raise StartupError(
            f"the base model of {name} is stored as {scheme.method}, into which no adapter can be "
            "merged: give the base model as --model-id, and name the adapter in --lora-adapters"
        )
    config = ModelConfig(checkpoint.fields)
    warnings = [] if scheme.warning is None else [scheme.warning]
    try:
        spec = spec_of(config)
    except UnknownFamilyError:
        if rope_factor is not None:
            raise StartupError(
                f"--rope-scaling is not served for {config.model_type}: set it in the model's config.json"
            ) from None
        return Model(
            checkpoint=checkpoint, name=name, config=config, spec=None, scheme=scheme, warnings=tuple(warnings)
        )
    if rope_factor is not None:
        spec = with_linear_rope(spec, rope_factor)
    if config.model_type in TEXT_TYPES or _lies_deeper(spec, checkpoint):
        spec, checkpoint = _text_part(spec, checkpoint, config)
        if config.model_type in TEXT_TYPES and family_name(checkpoint.fields) is None:
            warnings.append(f"Only the text model of {config.model_type} is loaded: images are not served")
    spec = _with_stored_experts(spec, checkpoint)
    if scheme.method is None or scheme.quantize is not None:
        stored = [name for one in checkpoint.headers.values() for name in one.tensors]
        check_stated_parts(text_config(config), stored)
        layers = spec.names.layers
        check_layers_alike((layers, layers.removeprefix(spec.names.base)), stored, [type(one) for one in spec.mixers])
    spec, warning = with_stored_head(spec, checkpoint, config)
    warnings += [] if warning is None else [warning]
    model = Model(checkpoint=checkpoint, name=name, config=config, spec=spec, scheme=scheme, warnings=tuple(warnings))
    return model if checkpoint.merged is None else _merging(model, spec, checkpoint.merged)


def describe_pooled(checkpoint: Checkpoint, *, quantize: str | None = None, name: str | None = None) -> Model:
    """Describe a model whose hidden states are wanted."""
    name = name or str(checkpoint.directory)
    scheme = resolve(checkpoint, quantize, name)
    if checkpoint.merged is not None:
        raise StartupError(f"{name} is a LoRA adapter: adapters are served for models that generate text only")
    config = ModelConfig(checkpoint.fields)
    stored = {tensor for header in checkpoint.headers.values() for tensor in header.tensors}
    try:
        spec: Spec | None = pooled_spec_of(config, stored)
    except UnknownFamilyError:
        spec = None
    return Model(checkpoint=checkpoint, name=name, config=config, spec=spec, scheme=scheme)


def _merging(model: Model, spec: Spec, folder: Path) -> Model:
    """Add a merged adapter; changed embedding or head are no longer tied."""
    adapter = read_adapter(model.name, folder, model_products(spec), module_bases(model, spec))
    tables = (spec.names.embedding, spec.names.head)
    if spec.tied_head:
        adapter = with_tied_rows(adapter, *tables)
    tied = spec.tied_head and not any(module in adapter.pairs or module in adapter.rows for module in tables)
    return dataclasses.replace(model, spec=dataclasses.replace(spec, tied_head=tied), merged=adapter)


def module_bases(model: Model, spec: Spec) -> tuple[str, ...]:
    """Return what names of modules may begin with, in files and in adapters."""
    own = spec.names.base
    others = BASES if own in BASES else _OF_LIBRARY.get(own, ())
    return (own, *(base for base in others if base != own))


def _lies_deeper(spec: Spec, checkpoint: Checkpoint) -> bool:
    """Whether a vision model's files have their text model's config."""
    embedding = spec.names.embedding.removeprefix(spec.names.base) + ".weight"
    stored = {name for header in checkpoint.headers.values() for name in header.tensors}
    own = ("", spec.names.base)
    return (
        spec.names.base in BASES
        and not any(base + embedding in stored for base in own)
        and any(base + embedding in stored for base in BASES)
    )


def _text_part(spec: Spec, checkpoint: Checkpoint, config: ModelConfig) -> tuple[Spec, Checkpoint]:
    """Return `spec` by a vision model's names, and the checkpoint without other tensors."""
    stored = [name for header in checkpoint.headers.values() for name in header.tensors]
    names = text_names(spec.names, stored)
    modules = (names.layers, names.head, *(getattr(names, field) for field in OUTER_NAMES))
    prefixes = tuple(f"{module}." for module in modules if module is not None)
    headers = {
        path: Header({name: one for name, one in header.tensors.items() if name.startswith(prefixes)}, header.metadata)
        for path, header in checkpoint.headers.items()
    }
    others = tuple(name for name in stored if not name.startswith(prefixes))
    unread = (name for name in others if not is_of_tower(name))
    check_leftover(unread, config.model_type, lambda name: None, known=spec.left_over)
    return dataclasses.replace(spec, names=names), dataclasses.replace(checkpoint, headers=headers, other=others)


_ONE_BY_ONE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What files call an expert's gate, up and down."""


def _with_stored_experts(spec: Spec, checkpoint: Checkpoint) -> Spec:
    """Return a spec whose experts are read as they are stored: one by one, or all in one tensor."""
    if not any(isinstance(mlp, Moe | ExpertsBeside) for mlp in spec.mlps):
        return spec
    shapes = {name: one.shape for header in checkpoint.headers.values() for name, one in header.tensors.items()}
    layers = spec.names.layers
    modules = {name.rpartition(".")[0] for name in shapes}
    prefixes = (layers, layers.removeprefix(spec.names.base))
    mlps: list[MlpSpec | None] = []
    for layer, mlp in enumerate(spec.mlps):
        of_layer = [f"{one}.{layer}." for one in prefixes]
        if isinstance(mlp, ExpertsBeside):
            mlps.append(dataclasses.replace(mlp, experts=_one_by_one(mlp.experts, of_layer, modules)))
        else:
            found = _as_stored(mlp, of_layer, shapes, spec)
            mlps.append(_one_by_one(found, of_layer, modules) if isinstance(found, Moe) else found)
    return dataclasses.replace(spec, mlps=tuple(mlps))


def _one_by_one(moe: Moe, prefixes: Sequence[str], modules: Collection[str]) -> Moe:
    """Return a mixture with experts as stored: quantizers write a module for each matrix of fused ones."""
    store = moe.store
    if not isinstance(store, StackedExperts):
        return moe
    for names in _ONE_BY_ONE:
        if any(f"{prefix}{store.module}.0.{names[0]}" in modules for prefix in prefixes):
            return dataclasses.replace(moe, store=store.one_by_one(*names))
    return moe


def _as_stored(
    mlp: MlpSpec | None, prefixes: Sequence[str], shapes: Mapping[str, Sequence[int]], spec: Spec
) -> MlpSpec | None:
    """Return an MLP with experts as stored: Qwen 3 VL MoE's public files are [experts, in, out], transformers'
    [experts, out, in].
    """
    up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    shape = next((shapes[prefix + up] for prefix in prefixes if prefix + up in shapes), None)
    if shape is None or not (isinstance(mlp, Moe) and isinstance(mlp.store, SeparateExperts)):
        return mlp
    return dataclasses.replace(mlp, store=StackedExperts(up, down, rows_first=shape[-1] == spec.hidden_size))


def check_rank(model: Model, adapter: Adapter) -> None:
    """Raises StartupError for a rank above `--lora-max-rank`."""
    if model.max_adapter_rank is not None and adapter.rank > model.max_adapter_rank:
        raise adapter.error(f"rank {adapter.rank} is above --lora-max-rank {model.max_adapter_rank}")


def warn_of_other_base(model: Model, adapter: Adapter) -> None:
    """Warn once of an adapter made for another base model."""
    names = {Path(place).name.lower() for place in (model.name, model.checkpoint.directory)}
    if adapter.base is not None and Path(adapter.base).name.lower() not in names:
        _warn_of_base(adapter.name, adapter.base, model.name)


@functools.lru_cache(maxsize=1024)
def _warn_of_base(name: str, base: str, served: str) -> None:
    """Warn once each: shapes alone decide whether an adapter fits."""
    logger.warning("LoRA adapter `%s` was made for %.200s; it is served with %s", name, base, served)


def check_family(fields: Mapping[str, Any], num_stages: int = 1) -> None:
    """Refuse, by config.json, what cannot be served quantized and in stages."""
    config = ModelConfig(fields)
    try:
        spec_of(config)
    except UnknownFamilyError:
        if num_stages > 1:
            raise whole_only(config.model_type, num_stages) from None


def whole_only(model_type: str, num_stages: int) -> StartupError:
    """Return the error for a model that stages cannot divide."""
    if model_type in CROSSING:
        remedy = "leave it out, also --num-shard: the model is served on one device"
    else:
        remedy = "leave it out; --num-shard divides models that transformers has a tensor-parallel plan for"
    return StartupError(
        f"--num-stage {num_stages}: {model_type} is served by the transformers runner, whose layers cannot be divided "
        f"into stages; {remedy}"
    )


def plain_only(model_type: str, method: str, reason: str, *, on_load: bool) -> StartupError:
    """Return the error for a quantized model with a state per request."""
    if on_load:
        return StartupError(
            f"`--quantize {method}`: {model_type} is served by the stateful runner, which serves plain weights only "
            f"({reason}); leave it out"
        )
    return StartupError(f"{model_type} is stored as {method}; the stateful runner serves plain weights only ({reason})")


def cache_dtype(
    model: Model, requested: str | None, device: torch.device, attention: str | None = None
) -> torch.dtype | None:
    """Choose the KV cache's type; None: the model's.

    Unset, checkpoints made for float8 get it on GPUs that compute with it.
    """
    found = None
    if requested is not None:
        found = DTYPES[requested]
    elif device.type == "cuda" and has_float8(device) and model.spec is not None and attention not in KEEP_MODEL_TYPE:
        checkpoint = model.checkpoint
        wanted = wants_float8_cache(checkpoint.directory, checkpoint.fields, StartupError)
        found = torch.float8_e4m3fn if wanted else None
    if found is None or model.spec is None or model.spec.attention is None:
        return found
    logger.warning(
        "The KV cache keeps the model's type: %s has latent attention, whose cache is not served in float8",
        model.config.model_type,
    )
    return None


def check_batch_invariance(model: Model, device: torch.device, dtype: torch.dtype, num_ranks: int) -> None:
    """Refuse `--batch-invariant` where it cannot be honoured."""
    reason = _varies_with_the_batch(model, device, dtype, num_ranks)
    if reason is not None:
        raise StartupError(f"--batch-invariant cannot be honoured: {reason}")


def _varies_with_the_batch(model: Model, device: torch.device, dtype: torch.dtype, num_ranks: int) -> str | None:
    spec = model.spec
    if spec is None:
        return f"{model.config.model_type} is computed by transformers, which multiplies as its libraries do"
    if model.adapters or model.adapter_room:
        return "products with LoRA adapters depend on the number of rows; leave out --lora-adapters and --lora-root"
    if model.scheme.method is not None:
        return "products with quantized weights depend on the number of rows"
    if spec.attention is not None and device.type == "cuda":
        return "latent attention multiplies in a form that depends on the number of rows"
    if any(isinstance(mixer, GatedDeltaSpec | KimiDeltaSpec) for mixer in spec.mixers):
        return "gated delta nets multiply in a form that depends on the number of rows"
    if num_ranks > 1:
        return "a sum over several shards depends on its size; use --num-shard 1"
    if device.type != "cuda":
        if dtype is torch.float32 and cpp.usable(device, dtype):
            return None
        return "on a CPU it needs --dtype float32 and the C++ operators"
    if any(mixer is not None and not isinstance(mixer, ShortConvSpec) for mixer in spec.mixers):
        return "Mamba-2 multiplies in a form that depends on the number of rows"
    if any(mlp is not None for mlp in spec.mlps):
        return "experts multiply in a form that depends on the number of rows"
    if dtype not in (torch.float16, torch.bfloat16):
        return "on a GPU it needs --dtype float16 or bfloat16"
    return refusal(device)


def with_linear_rope(spec: Spec, factor: float) -> Spec:
    """Divide all rotations' positions by `factor` instead of the config's scaling, if the model rotates."""
    if not any(spec.ropes):
        raise StartupError("--rope-scaling: this model has no rotary positions; leave it out")
    scaled = [
        None
        if rope is None
        else dataclasses.replace(
            rope,
            kind="linear",
            parameters={
                "factor": factor,
                **{name: value for name, value in rope.parameters.items() if name.startswith("mrope_")},
            },
        )
        for rope in spec.ropes
    ]
    return dataclasses.replace(spec, ropes=tuple(scaled))
