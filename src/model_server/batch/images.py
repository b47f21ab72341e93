"""The images of a step are encoded before its forward. What is wrong with one is the error of its request alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from model_server.batch.extension import Failure
from model_server.batch.sequence import Sequence
from model_server.errors import RequestError
from model_server.vision.encoder import ImageEncoder

logger = logging.getLogger(__name__)


def encode_images(encoder: ImageEncoder, sequences: Iterable[Sequence]) -> list[Failure]:
    """Encode what the next forward of `sequences` reads. Returns those whose image cannot be encoded, and why.

    Raises what torch raises when memory is short: that ends the step, as in its forward.
    """
    failures: list[Failure] = []
    for sequence in sequences:
        images = sequence.images
        if images is None or sequence.finished:
            continue
        try:
            for wanted in images.wanted(sequence.cache_length, sequence.cache_length + sequence.input_length):
                wanted.encoded = encoder.find(wanted.image)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except RequestError as error:
            failures.append((sequence, f"request {sequence.id}: {error}"))
        except Exception:
            logger.exception("an image of request %d cannot be encoded", sequence.id)
            failures.append((sequence, f"request {sequence.id}: the model's vision tower cannot read the image"))
    return failures
