"""What reads the images of a model, from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from model_server.distributed.placement import Placement
from model_server.vision.encoder import ImageEncoder
from model_server.vision.families import VisionFamily
from model_server.vision.image import SeesImages
from model_server.vision.samples import sample_images
from model_server.vision.tower import load_tower


def load_encoder(
    directory: Path,
    name: str,
    family: VisionFamily,
    placement: Placement,
    tower: SeesImages | None = None,
    capacity: int | None = None,
) -> ImageEncoder:
    """For the model of type `name` in `directory`. tower: that of a model which is loaded as a whole; None: it is read
    from the folder. capacity: as of `ImageEncoder`. Imports transformers: seconds.

    Raises StartupError.
    """
    if tower is None:
        with torch.inference_mode():
            tower = load_tower(directory, name, family, placement.device, placement.dtype)
    return ImageEncoder(tower, capacity, placement.ranks.tensor, sample_images(directory, placement.dtype))
