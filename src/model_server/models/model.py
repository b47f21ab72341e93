"""A checkpoint and what its config makes of it, found out once, before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from model_server.attention.choice import KEEP_MODEL_TYPE
from model_server.cpp import library as cpp
from model_server.errors import StartupError
from model_server.kernels.availability import has_float8, refusal
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Spec
from model_server.models.families import UnknownFamilyError, spec_of
from model_server.quantization.kv_cache import DTYPES
from model_server.quantization.scheme import Scheme, resolve
from model_server.weights.checkpoint import Checkpoint
from wire.quantization.config import wants_float8_cache
from wire.quantization.methods import Choice

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """spec: None for a family that the native decoder does not know, which transformers may compute."""

    checkpoint: Checkpoint
    config: ModelConfig
    spec: Spec | None
    scheme: Scheme = dataclasses.field(default_factory=Scheme)


def describe(
    checkpoint: Checkpoint, *, rope_factor: float | None = None, quantize: str | None = None, name: str | None = None
) -> Model:
    """What `checkpoint` holds. rope_factor: positions are divided by it, whatever scaling the config names; None: as
    the config says. quantize: `--quantize`. name: what messages call the model; None: its folder.

    Raises StartupError for a config that cannot be used, for a quantization that is not served, and for a rope factor
    that the model has no use for.
    """
    scheme = resolve(checkpoint, quantize, name)
    config = ModelConfig(checkpoint.fields)
    try:
        spec = spec_of(config)
    except UnknownFamilyError:
        if rope_factor is not None:
            raise StartupError(
                f"--rope-scaling is not served for {config.model_type}: set it in the model's config.json"
            ) from None
        if scheme.method is not None:
            raise _plain_only(config.model_type, scheme.method, on_load=scheme.quantize is not None) from None
        return Model(checkpoint=checkpoint, config=config, spec=None)
    if rope_factor is not None:
        spec = with_linear_rope(spec, rope_factor)
    return Model(checkpoint=checkpoint, config=config, spec=spec, scheme=scheme)


def check_family(fields: Mapping[str, Any], choice: Choice) -> None:
    """Whether a family can be served quantized, as far as its config.json says. Raises StartupError."""
    config = ModelConfig(fields)
    try:
        spec_of(config)
    except UnknownFamilyError:
        if choice.method is not None:
            raise _plain_only(config.model_type, choice.method, on_load=choice.on_load) from None


def _plain_only(model_type: str, method: str, *, on_load: bool) -> StartupError:
    if on_load:
        return StartupError(
            f"`--quantize {method}`: {model_type} is served by the transformers runner, which serves plain weights "
            "only; leave it out"
        )
    return StartupError(f"{model_type} is stored as {method}; the transformers runner serves plain weights only")


def cache_dtype(
    model: Model, requested: str | None, device: torch.device, attention: str | None = None
) -> torch.dtype | None:
    """The type of the KV cache; None: the model's. requested: `--kv-cache-dtype`; attention: `--attention`.

    Unset, a checkpoint that was made for a cache in float8 gets one on a GPU that computes with it.
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
    """Raises StartupError if `--batch-invariant` cannot be honoured for this model here."""
    reason = _varies_with_the_batch(model, device, dtype, num_ranks)
    if reason is not None:
        raise StartupError(f"--batch-invariant cannot be honoured: {reason}")


def _varies_with_the_batch(model: Model, device: torch.device, dtype: torch.dtype, num_ranks: int) -> str | None:
    spec = model.spec
    if spec is None:
        return f"{model.config.model_type} is computed by transformers, which multiplies as its libraries do"
    if model.scheme.method is not None:
        return "products with quantized weights depend on the number of rows"
    if num_ranks > 1:
        return "a sum over several shards depends on its size; use --num-shard 1"
    if device.type != "cuda":
        if dtype is torch.float32 and cpp.usable(device, dtype):
            return None
        return "on a CPU it needs --dtype float32 and the C++ operators"
    if spec.attention is not None or any(mlp is not None for mlp in spec.mlps):
        return "latent attention and experts multiply in a form that depends on the number of rows"
    if dtype not in (torch.float16, torch.bfloat16):
        return "on a GPU it needs --dtype float16 or bfloat16"
    return refusal(device)


def with_linear_rope(spec: Spec, factor: float) -> Spec:
    """`spec`, all of its rotations with positions divided by `factor`, instead of the config's own scaling.

    Raises StartupError for a model that knows positions in another way.
    """
    if not any(spec.ropes):
        raise StartupError("--rope-scaling: this model has no rotary positions; leave it out")
    scaled = [
        None if rope is None else dataclasses.replace(rope, kind="linear", parameters={"factor": factor})
        for rope in spec.ropes
    ]
    return dataclasses.replace(spec, ropes=tuple(scaled))
