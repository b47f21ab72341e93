"""What reads the images of a model, from its folder."""

from __future__ import annotations

import torch

from model_server.distributed.placement import Placement
from model_server.vision.encoder import ImageEncoder
from model_server.vision.families import VisionFamily
from model_server.vision.image import SeesImages
from model_server.vision.samples import sample_images
from model_server.vision.tower import load_tower
from model_server.weights.checkpoint import Checkpoint


def load_encoder(
    checkpoint: Checkpoint,
    name: str,
    family: VisionFamily,
    placement: Placement,
    *,
    tower: SeesImages | None,
    capacity: int | None,
) -> ImageEncoder:
    """Load what reads images of type `name`; imports transformers, for seconds.

    Args:
        tower: Of a model loaded whole; None: read it.
    """
    directory, dtype = checkpoint.directory, placement.dtype
    if tower is None:
        with torch.inference_mode():
            tower = load_tower(directory, name, family, placement.device, dtype, checkpoint.other)
    ranks = placement.ranks
    together = ranks.tensor if ranks.layout.stage.size == 1 else ranks.world
    return ImageEncoder(tower, capacity, together, sample_images(directory, dtype))
