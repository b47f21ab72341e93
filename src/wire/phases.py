"""What a starting process does: records for its launcher only."""

# | Process | Phases, in order                                                                                      |
# |---------|-------------------------------------------------------------------------------------------------------|
# | shard   | starting, checkpoint, importing, process group, loading, binding, serving; then warm-up, ready          |
# | router  | starting, importing, tokenizer, warm-up, binding, ready                                                 |
#
# `starting` is the launcher's own name for a process that has not logged a phase yet.

from __future__ import annotations

import logging

STARTING, CHECKPOINT, IMPORTING, PROCESS_GROUP = "starting", "checkpoint", "importing", "process group"
LOADING, BINDING, SERVING = "loading", "binding", "serving"
TOKENIZER, WARM_UP, READY = "tokenizer", "warm-up", "ready"

FIELD = "phase"
LOGGER = "wire.phases"
VARIABLE = "TERCET_PHASES"
"""Set to 1 by a launcher in the environment of its children: they log their phases whatever the level of their log."""

_logger = logging.getLogger(LOGGER)


def enter(phase: str) -> None:
    """This process begins with `phase`."""
    _logger.debug("Phase: %s", phase, extra={FIELD: phase})
