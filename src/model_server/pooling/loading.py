"""From a described checkpoint to a PoolingRunner."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.decoder.decoder import Decoder
from model_server.models.load import Progress, load_runner
from model_server.models.model import Model
from model_server.pooling.heads import ScoreHead, answer_head, masked_head, score_head
from model_server.pooling.model import PooledModel
from model_server.pooling.modules import splade, stages
from model_server.pooling.native import NativeModel
from model_server.pooling.plan import PoolingPlan
from model_server.pooling.runner import PoolingRunner


def load(
    model: Model,
    plan: PoolingPlan,
    placement: Placement,
    attention: AttentionChoice,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PoolingRunner:
    """Load this rank's part of `model`."""
    device = placement.device
    with torch.inference_mode():
        loaded = _model(model, placement, attention, progress, trust_remote_code=trust_remote_code)
        if plan.task.task != "embed":
            head, count = _head(model, plan, device, loaded.hidden_size)
            return PoolingRunner(loaded, plan, device, dimensions=count, head=head)
        if plan.is_sparse:
            sparse, count = _sparse(model, plan, device)
            return PoolingRunner(loaded, plan, device, dimensions=count, sparse=sparse)
        made, dimensions = stages(plan.modules, loaded.hidden_size * len(plan.modes), device)
        return PoolingRunner(loaded, plan, device, stages=made, dimensions=dimensions)


def _model(
    model: Model,
    placement: Placement,
    attention: AttentionChoice,
    progress: Progress | None,
    *,
    trust_remote_code: bool,
) -> PooledModel:
    if model.spec is not None:
        runner = load_runner(model, placement, attention, progress=progress)
        assert isinstance(runner, Decoder)
        return NativeModel(runner, model.spec, placement.dtype, placement.device)
    if placement.ranks.world.size > 1:
        raise StartupError(
            f"--num-shard {placement.ranks.world.size}: {model.config.model_type} is computed by transformers, on one "
            "device; leave it out"
        )
    if model.scheme.method is not None:
        raise StartupError(
            f"{model.config.model_type} is computed by transformers, with plain weights only: {model.scheme.method} "
            "is not served"
        )
    from model_server.pooling import library

    return library.load(model, placement.dtype, placement.device, trust_remote_code=trust_remote_code)


def _head(model: Model, plan: PoolingPlan, device: torch.device, hidden_size: int) -> tuple[ScoreHead, int]:
    if plan.answers is None:
        return score_head(model, device, hidden_size)
    if model.spec is None:
        raise StartupError(f"{model.config.model_type} is no model whose answers can be read as scores")
    return answer_head(model, device, *plan.answers), 1


def _sparse(model: Model, plan: PoolingPlan, device: torch.device) -> tuple[Callable[[Tensor], Tensor], int]:
    logits, count = masked_head(model, device)
    pool = splade(plan.splade or {})
    return (lambda hidden: pool(logits(hidden.float()))), count
