"""From a directory to a Runner: the native decoder for the families it knows, else transformers' own modelling.

transformers, which alone costs seconds of start-up, is imported only for models that need it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.build import build
from model_server.models.families import UnknownFamilyError, spec_of
from model_server.models.spec import Spec
from model_server.runner.runner import Runner
from model_server.weights.locate import weight_files
from model_server.weights.reader import SafetensorsReader

logger = logging.getLogger(__name__)


def with_linear_rope(spec: Spec, factor: float) -> Spec:
    """`spec`, all of its rotations with positions divided by `factor`, in the place of the config's own scaling.

    Raises StartupError for a model that knows positions in another way.
    """
    if not any(spec.ropes):
        raise StartupError("--rope-scaling: this model has no rotary positions; leave it out")
    scaled = [
        None if rope is None else dataclasses.replace(rope, kind="linear", parameters={"factor": factor})
        for rope in spec.ropes
    ]
    return dataclasses.replace(spec, ropes=tuple(scaled))


def load_runner(
    model_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup,
    attention: AttentionBackend,
    substitute: Callable[[AttentionBackend, Sequence[AttentionLayer]], AttentionBackend] | None = None,
    trust_remote_code: bool = False,
    rope_factor: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Runner:
    """Load this rank's part of the model in `model_dir`; `progress(layers_done, layers)` follows the reading.

    attention: one that serves what `attention_layers_of` tells. Where that tells nothing, `substitute` is asked, once
    the layers are known, for the backend or another with the same blocks.
    trust_remote_code: code from the model's folder may be run, where a type is not known without.
    rope_factor: positions are divided by it, whatever scaling the config names; None: as the config says.

    Raises StartupError, one line: unknown model type, unusable config, missing, damaged or quantized weights, sizes
    that cannot be divided among the ranks, a model that fails its self-check.
    """
    started = time.perf_counter()
    config = ModelConfig.read(model_dir)
    try:
        spec = spec_of(config)
    except UnknownFamilyError:
        if rope_factor is not None:
            raise StartupError(
                f"--rope-scaling is not served for {config.model_type}: set it in the model's config.json"
            ) from None
        from model_server.models.hf import choice, loading

        checkpoint = loading.open_checkpoint(model_dir, config, trust_remote_code=trust_remote_code)
        with torch.inference_mode():
            return choice.load_runner(
                checkpoint, device=device, dtype=dtype, group=group, backend=attention, substitute=substitute
            )
    if rope_factor is not None:
        spec = with_linear_rope(spec, rope_factor)
    files = weight_files(model_dir)
    reading = SafetensorsReader(files, dtype=dtype, device=device, base_prefix=spec.names.base)
    with reading as reader, torch.inference_mode():
        runner = build(spec, reader, device=device, group=group, attention=attention, progress=progress)
    logger.info(
        "Loaded %s: %d layers, %.1f MiB of weights in %.2f s",
        config.model_type,
        spec.num_layers,
        runner.weight_bytes / 2**20,
        time.perf_counter() - started,
    )
    return runner
