"""Chooses transformers' runner: the paged one if it passes its check, else a cache per request."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.config import CROSSING
from model_server.models.hf.adapters import HookedAdapters
from model_server.models.hf.encoder_decoder import ATTENTION_NAMES, EncoderDecoderRunner
from model_server.models.hf.encoder_decoder import register as register_crossing
from model_server.models.hf.loading import (
    HfModel,
    attention_of_text,
    check_sharding,
    load_model,
    max_positions,
    one_line,
)
from model_server.models.hf.paged import ATTENTION_NAME, TransformersRunner, UnsuitableError, register
from model_server.models.hf.positions import by_length
from model_server.models.hf.quantized import check_quantized
from model_server.models.hf.self_check import (
    check_adapted,
    check_captured,
    check_encoder_decoder,
    check_paged,
    check_stateful,
)
from model_server.models.hf.stateful import StatefulRunner
from model_server.models.model import check_rank, warn_of_other_base
from model_server.runner.graph_capture import CudaGraphCapture
from model_server.runner.runner import Runner

logger = logging.getLogger(__name__)

# Kinds of layers that attend only to their own tokens.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
# Encoder-decoders that do not run in batches -> why.
_ALONE = {
    "encoder-decoder": "its encoder and its decoder are models of their own",
    **dict.fromkeys(("nllb-moe", "switch_transformers"), "its experts drop tokens by the size of a batch"),
}


def load_runner(hf: HfModel, placement: Placement, attention: AttentionChoice, *, captures: bool = False) -> Runner:
    """Load the model, try the runners in turn, and log the one that serves.

    Args:
        captures: Steps are to be captured as CUDA graphs if possible.

    Raises:
        StartupError: Neither runs right, or a state per request is to be sharded.
    """
    started = time.perf_counter()
    logger.info("%s is not one of the native families: transformers' modelling is loaded", hf.model_type)
    if hf.reads_text_alone and placement.ranks.world.rank == 0:
        logger.warning("Only the text model of %s is served: it reads no images and no sound", hf.model_type)
    if hf.is_encoder_decoder and hf.described.adapter_folders:
        raise StartupError(f"LoRA adapters of {hf.model_type} are not served: merge the adapter into the model")
    reason = _needs_state(hf)
    check_quantized(hf.described, placement.ranks.tensor.size, reason)
    model = None
    if reason is None:
        check_sharding(hf, placement.ranks.tensor.size)
        try:
            model = _load(hf, placement, _register(hf, placement.ranks.tensor.rank))
            runner, error = _paged(hf, model, placement, attention)
        except UnsuitableError as unsuitable:
            reason = str(unsuitable)
        else:
            if isinstance(runner, EncoderDecoderRunner):
                _report("transformers", hf, error, started, "")
                return runner
            if hf.described.adapter_folders:
                _adapt(hf, runner, placement)
            if captures and placement.device.type == "cuda" and runner.may_be_capturable:
                _try_capture(runner, placement)
            _report("transformers", hf, error, started, "")
            return runner
    if hf.described.adapter_folders:
        raise StartupError(
            f"{hf.model_type} needs a state for each request ({reason}), and takes no LoRA adapters: merge the adapter "
            "into the model"
        )
    check_quantized(hf.described, placement.ranks.tensor.size, reason)
    if placement.cache_dtype is not None:
        raise StartupError(
            f"--kv-cache-dtype: {hf.model_type} keeps a state for each request ({reason}), which has the model's type; "
            "leave it out"
        )
    if placement.ranks.tensor.size > 1:
        raise StartupError(
            f"{hf.model_type} needs a state for each request ({reason}), which cannot be divided among shards: "
            "use --num-shard 1"
        )
    if model is None:
        model = _load(hf, placement, None)
    else:
        own = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        model.set_attn_implementation(attention_of_text(hf.config, own))
    stateful, error, why = _stateful_or_recomputing(hf, model, placement)
    _report("stateful", hf, error, started, f"; {why or reason}: no chunked prefill, no prefix cache")
    return stateful


def _stateful_or_recomputing(hf: HfModel, model: Any, placement: Placement) -> tuple[StatefulRunner, float, str | None]:
    """Return the runner, its error in the check, and why it recomputes, if it does."""
    try:
        return *_stateful(hf, model, placement, recomputes=False), None
    except StartupError as refusal:
        if hf.is_encoder_decoder or hf.model_type in CROSSING:
            raise
        try:
            runner, error = _stateful(hf, model, placement, recomputes=True)
        except StartupError:
            raise refusal from None
        return runner, error, f"{str(refusal).partition(': ')[2]}, so every step computes its whole sequence again"


def _needs_state(hf: HfModel) -> str | None:
    """Say why the paged runner need not be tried, if so."""
    config = hf.text_config
    if hf.model_type in CROSSING:
        return "its layers of cross attention read images"
    if hf.is_encoder_decoder:
        return _ALONE.get(hf.model_type)
    model_class = hf.model_class
    if model_class is not None and getattr(model_class, "_is_stateful", False):
        return "its layers are recurrent"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENDING)
    if other:
        return f"it has layers of type {other[0]}"
    if getattr(config, "alibi", False):
        return "its attention adds ALiBi biases"
    if config is hf.config and model_class is not None and not model_class.is_backend_compatible():
        return "its attention cannot be replaced"
    return None


def _load(hf: HfModel, placement: Placement, attention: str | None) -> Any:
    try:
        return load_model(hf, placement, attention=attention)
    except (StartupError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if attention is None:
            raise StartupError(f"cannot load {hf.model_type}: {one_line(error)}") from error
        raise UnsuitableError(one_line(error)) from error


def _register(hf: HfModel, rank: int) -> str:
    """Register the attention that the model is loaded with, and return its name."""
    if not hf.is_encoder_decoder:
        register()
        return ATTENTION_NAME
    register_crossing(rank)
    return ATTENTION_NAMES[bool(getattr(hf.model_class, "_supports_sdpa", False))]


def _paged(
    hf: HfModel, model: Any, placement: Placement, attention: AttentionChoice
) -> tuple[TransformersRunner | EncoderDecoderRunner, float]:
    """Make the paged runner.

    Raises:
        UnsuitableError: On all ranks alike.
        StartupError: The requested backend cannot serve.
    """
    failure = None
    runner: TransformersRunner | EncoderDecoderRunner | None = None
    made = (model, attention, placement.device, max_positions(hf.text_config), by_length(model))
    try:
        if hf.is_encoder_decoder:
            runner = EncoderDecoderRunner(*made, rank=placement.ranks.tensor.rank)
            verdict = check_encoder_decoder(runner, placement.dtype, placement.device)
        else:
            runner = TransformersRunner(*made)
            verdict = check_paged(runner, placement.dtype, placement.device)
        if not verdict.passed:
            failure = f"it fails the self-check over the paged cache, relative error {verdict.error:.1e}"
    except (torch.OutOfMemoryError, StartupError):
        raise
    except UnsuitableError as error:
        failure = str(error)
    except Exception as error:
        failure = f"it does not run over the paged cache: {one_line(error)}"
    if not placement.ranks.world.all_reduce_min(0 if failure else 1) or runner is None:
        if runner is not None:
            runner.give_back()
        raise UnsuitableError(failure or "it failed the self-check on another rank")
    return runner, verdict.error


def _adapt(hf: HfModel, runner: TransformersRunner, placement: Placement) -> None:
    """Load the adapters, and try that rows get their own."""
    model, device = hf.described, placement.device
    hooked = HookedAdapters(runner.model, model.adapter_folders, placement.dtype, device)
    for adapter in hooked.sites.adapters:
        check_rank(model, adapter)
        warn_of_other_base(model, adapter)
    runner.adapt(hooked.sites.current, hooked.sites.names)
    verdict = check_adapted(runner, hooked.sites.current, placement.dtype, device)
    unused = sorted(hooked.hooked - hooked.called)
    if unused:
        raise StartupError(f"LoRA adapters: {hf.model_type} does not call {unused[0]} as a layer; merge the adapter")
    if not verdict.passed:
        raise StartupError(
            f"LoRA adapters are not served for {hf.model_type}: a row of a batch gives other results than alone "
            f"(relative error {verdict.error:.1e}); merge the adapter into the model"
        )


def _try_capture(runner: TransformersRunner, placement: Placement) -> None:
    """Capture steps, if that works and changes nothing on any rank."""
    device, world = placement.device, placement.ranks.world
    passed = check_captured(runner, CudaGraphCapture(device), placement.dtype, device, world)
    if world.all_reduce_min(int(passed)):
        runner.allow_capture()
    else:
        logger.warning("No CUDA graphs for this model: its steps cannot be captured, or replays give other results")


def _stateful(hf: HfModel, model: Any, placement: Placement, *, recomputes: bool) -> tuple[StatefulRunner, float]:
    """Return the runner and its check's difference.

    Raises:
        StartupError: The model cannot be served this way.
    """
    try:
        positions = max_positions(hf.text_config)
        runner = StatefulRunner(model, placement.device, positions, by_length(model), recomputes=recomputes)
        verdict = check_stateful(runner, placement.dtype, placement.device)
    except torch.OutOfMemoryError:
        raise
    except StartupError as error:
        raise StartupError(f"{hf.model_type} cannot be served: {error}") from None
    except Exception as error:
        raise StartupError(f"{hf.model_type} cannot be served: {one_line(error)}") from error
    if not verdict.passed:
        raise StartupError(
            f"{hf.model_type} cannot be served: with a cache it gives other results than without "
            f"(relative error {verdict.error:.1e})"
        )
    return runner, verdict.error


def _report(name: str, hf: HfModel, error: float, started: float, why: str) -> None:
    logger.info(
        "Runner `%s` serves %s, checked in %.1f s with relative error %.1e%s",
        name,
        hf.model_type,
        time.perf_counter() - started,
        error,
        why,
    )
