"""The images of a step, encoded before its forward; a bad one fails its request alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.batch.growth import Failure
from model_server.batch.sequence import Sequence
from model_server.errors import RequestError
from model_server.vision.encoder import ImageEncoder
from model_server.vision.image import Encoded
from model_server.vision.placed import PlacedImage

logger = logging.getLogger(__name__)


CANNOT_READ = "the model's vision tower cannot read the image"


def encode_images(encoder: ImageEncoder, sequences: Iterable[Sequence]) -> list[Failure]:
    """Encode what the next forward reads; return failures on any rank.

    A lack of memory ends the step if this rank is alone: other ranks would wait.
    """
    failures: list[Failure] = []
    for sequence in sequences:
        images = sequence.images
        if images is None or sequence.finished:
            continue
        wanted = images.wanted(sequence.cache_length, sequence.cache_length + sequence.input_length)
        if not wanted:
            continue
        reason = _encode(encoder, sequence.id, wanted)
        if not encoder.all_succeeded(reason is None):
            failures.append((sequence, f"request {sequence.id}: {reason or CANNOT_READ}"))
    return failures


def _encode(encoder: ImageEncoder, request_id: int, wanted: Iterable[PlacedImage]) -> str | None:
    """Encode one request's images; say why one cannot be."""
    try:
        for one in wanted:
            one.encode(encoder.find)
    except (torch.OutOfMemoryError, MemoryError):
        if encoder.is_alone:
            raise
        logger.exception("no memory for an image of request %d", request_id)
        return CANNOT_READ
    except RequestError as error:
        return str(error)
    except Exception:
        logger.exception("an image of request %d cannot be encoded", request_id)
        return CANNOT_READ
    return None


# Of each sequence in a step its first token, and the one behind its last.
Spans = list[tuple[int, int]]
# (first row of the step, what is there instead or added)
Embeddings = tuple[tuple[int, Tensor], ...]


def step_positions(sequences: Rows[Sequence], spans: Spans) -> npt.NDArray[np.int64]:
    """Return [num_tokens] int64, or [3, num_tokens] if some differ."""
    if any(s.images is not None and s.images.has_sections(a, b) for s, (a, b) in zip(sequences, spans, strict=True)):
        parts = [
            np.tile(np.arange(a, b, dtype=np.int64), (3, 1)) if s.images is None else s.images.positions(a, b)
            for s, (a, b) in zip(sequences, spans, strict=True)
        ]
        return np.concatenate(parts, axis=1)
    starts = [
        (a, b, 0) if s.images is None else (a, b, s.images.offset_at(a))
        for s, (a, b) in zip(sequences, spans, strict=True)
    ]
    return np.concatenate([np.arange(a + offset, b + offset, dtype=np.int64) for a, b, offset in starts])


def step_reach(sequences: Rows[Sequence], spans: Spans) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Return the step's `last_keys` and `first_keys`; None if all is causal."""
    found = [None if s.images is None else s.images.reach(a, b) for s, (a, b) in zip(sequences, spans, strict=True)]
    if not any(found):
        return None
    parts = [
        (np.arange(a, b, dtype=np.int64), np.full(b - a, -1, np.int64)) if one is None else one
        for one, (a, b) in zip(found, spans, strict=True)
    ]
    return np.concatenate([last for last, _ in parts]), np.concatenate([first for _, first in parts])


def step_embeddings(sequences: Rows[Sequence], spans: Spans) -> tuple[Embeddings, Embeddings]:
    """Return what replaces image tokens' rows, and what is added behind the first layers."""
    embeddings: list[tuple[int, Tensor]] = []
    deep: list[tuple[int, Tensor]] = []
    start = 0
    for sequence, (first, stop) in zip(sequences, spans, strict=True):
        if sequence.images is not None and not sequence.images.crosses:
            for row, rows, layers in sequence.images.spans(first, stop):
                embeddings.append((start + row, rows))
                if layers is not None:
                    deep.append((start + row, layers))
        start += stop - first
    return tuple(embeddings), tuple(deep)


def step_pictures(sequences: Rows[Sequence], spans: Spans) -> tuple[tuple[int, Encoded], ...]:
    """Return what cross attention reads: each image token's row, with its encoded image."""
    found: list[tuple[int, Encoded]] = []
    start = 0
    for sequence, (first, stop) in zip(sequences, spans, strict=True):
        if sequence.images is not None and sequence.images.crosses:
            found += [(start + row, encoded) for row, encoded in sequence.images.pictures(first, stop)]
        start += stop - first
    return tuple(found)
