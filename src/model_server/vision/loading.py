"""What reads the images of a model, from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from model_server.distributed.group import ProcessGroup
from model_server.vision.encoder import ImageEncoder
from model_server.vision.families import VisionFamily
from model_server.vision.samples import sample_images
from model_server.vision.tower import load_tower


def load_encoder(
    directory: Path,
    name: str,
    family: VisionFamily,
    device: torch.device,
    dtype: torch.dtype,
    *,
    capacity: int | None,
    ranks: ProcessGroup,
) -> ImageEncoder:
    """For the model of type `name` in `directory`. capacity, ranks: as of `ImageEncoder`. Imports
    transformers: seconds.

    Raises StartupError.
    """
    with torch.inference_mode():
        tower = load_tower(directory, name, family, device, dtype)
    return ImageEncoder(tower, capacity, ranks, sample_images(directory, dtype))
