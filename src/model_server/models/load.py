"""From a directory to a Runner: the native decoder for the families it knows, else transformers' own modelling.

transformers, which alone costs seconds of start-up, is imported only for models that need it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.distributed import ProcessGroup
from model_server.layers.small_products import measure
from model_server.models.build import build
from model_server.models.config import ModelConfig
from model_server.models.families import UnknownFamilyError, spec_of
from model_server.runner import Runner
from model_server.weights.locate import weight_files
from model_server.weights.reader import SafetensorsReader

logger = logging.getLogger(__name__)


def load_runner(
    model_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup,
    attention: AttentionBackend,
    substitute: Callable[[AttentionBackend, Sequence[AttentionLayer]], AttentionBackend] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Runner:
    """Load this rank's part of the model in `model_dir`; `progress(layers_done, layers)` follows the reading.

    attention: one that serves what `attention_layers_of` tells. Where that tells nothing, `substitute` is asked, once
    the layers are known, for the backend or another with the same blocks.
    trust_remote_code: code from the model's folder may be run, where a type is not known without.

    Raises StartupError, one line: unknown model type, unusable config, missing, damaged or quantized weights, sizes
    that cannot be divided among the ranks, a model that fails its self-check.
    """
    started = time.perf_counter()
    config = ModelConfig.read(model_dir)
    try:
        spec = spec_of(config)
    except UnknownFamilyError:
        from model_server.models.pretrained import choice, loading

        checkpoint = loading.open_checkpoint(model_dir, config, trust_remote_code=trust_remote_code)
        with torch.inference_mode():
            return choice.load_runner(
                checkpoint, device=device, dtype=dtype, group=group, backend=attention, substitute=substitute
            )
    files = weight_files(model_dir)
    reading = SafetensorsReader(files, dtype=dtype, device=device, base_prefix=spec.names.base)
    with reading as reader, torch.inference_mode():
        runner = build(spec, reader, device=device, group=group, attention=attention, progress=progress)
        if device.type == "cuda":
            measure(device, group)
    logger.info(
        "Loaded %s: %d layers, %.1f MiB of weights in %.2f s",
        config.model_type,
        spec.num_layers,
        runner.weight_bytes / 2**20,
        time.perf_counter() - started,
    )
    return runner
