"""Whether a model's decode steps are captured as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.graph_capture import GraphCapture
from model_server.runner.runner import Kept, Runner

logger = logging.getLogger(__name__)


def with_graphs(
    runner: Runner,
    sizes: tuple[int, ...],
    capture: GraphCapture,
    windows: Mapping[int, tuple[int, ...]] | None = None,
    *,
    keeps: Callable[[], Kept | None] | None = None,
) -> Runner:
    """Wrap a runner whose decode steps can be captured, and log the choice.

    For pipeline stages `GraphedRunner.capture` decides, since layers differ.
    """
    if not sizes:
        logger.info("CUDA graphs are off (--cuda-graphs 0)")
    elif not (runner.traits.capturable or runner.traits.is_stage):
        logger.info("CUDA graphs are off: this model's decode step, or its attention backend, needs the host")
    else:
        joined = getattr(runner.traits.attention, "joins_windows", False)
        return GraphedRunner(runner, sizes, capture, windows if joined else None, keeps=keeps)
    return runner
