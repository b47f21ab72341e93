"""From a described checkpoint to a PoolingRunner."""

from __future__ import annotations

import logging

import torch

from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.decoder.decoder import Decoder
from model_server.models.load import Progress, load_runner
from model_server.models.model import Model
from model_server.pooling.model import PooledModel
from model_server.pooling.modules import stages
from model_server.pooling.native import NativeModel
from model_server.pooling.plan import PoolingPlan
from model_server.pooling.runner import PoolingRunner

logger = logging.getLogger(__name__)


def load(
    model: Model,
    plan: PoolingPlan,
    placement: Placement,
    attention: AttentionChoice,
    *,
    progress: Progress | None = None,
) -> PoolingRunner:
    """Load this rank's part of `model`. Raises StartupError, one line."""
    with torch.inference_mode():
        loaded = _model(model, placement, attention, progress)
        if plan.task.task != "embed":
            raise StartupError(f"the task {plan.task.task} is not served for {model.config.model_type} yet")
        if plan.is_sparse:
            raise StartupError("--pooling splade: sparse vectors are not served yet")
        width = loaded.hidden_size * len(plan.modes)
        made, dimensions = stages(plan.modules, width, placement.device)
        return PoolingRunner(loaded, plan, placement.device, stages=made, dimensions=dimensions)


def _model(model: Model, placement: Placement, attention: AttentionChoice, progress: Progress | None) -> PooledModel:
    if model.spec is None:
        raise StartupError(f"embeddings of {model.config.model_type} are not served yet")
    runner = load_runner(model, placement, attention, progress=progress)
    assert isinstance(runner, Decoder)
    return NativeModel(runner, model.spec, placement.dtype, placement.device)
