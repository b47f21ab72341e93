"""Which attention backend serves: the only place that chooses."""

from __future__ import annotations

import logging

import torch

from model_server.attention.backend import AttentionBackend
from model_server.attention.reference import ReferenceBackend
from model_server.errors import StartupError

logger = logging.getLogger(__name__)

# What `--attention` and ATTENTION accept: our own names, then TGI's.
OWN_NAMES = ("reference",)
TGI_NAMES = ("paged", "flashdecoding", "flashinfer")


def select_backend(requested: str | None, device: torch.device) -> AttentionBackend:
    """The backend for `device`; `requested` is the user's word (`--attention`, ATTENTION), None if unset.

    TGI's names stand for "the best that is present". Raises StartupError for an unknown word.
    """
    if requested is not None and requested not in OWN_NAMES + TGI_NAMES:
        raise StartupError(f"--attention {requested} is unknown; choose one of {', '.join(OWN_NAMES + TGI_NAMES)}")
    backend = ReferenceBackend()
    if requested is not None and requested != backend.name:
        logger.info("Attention `%s` is served by the `%s` backend on %s", requested, backend.name, device.type)
    return backend
