"""What reads the images of a model, from its folder."""

from __future__ import annotations

import torch

from model_server.config import ServeConfig
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.features.images.encoder import ImageEncoder, sample_images
from model_server.features.images.families import vision_family
from model_server.features.images.feature import Images
from model_server.features.images.image import SeesImages
from model_server.features.images.tower import CrossTower, load_tower
from model_server.models.hf.loading import quiet
from model_server.models.hf.stateful import StatefulRunner
from model_server.models.model import Model
from model_server.runner.runner import Runner
from model_server.text.tokenizer import Tokenizer
from wire.processes.open_files import raise_open_files

# Each large image that is not encoded yet is one.
_OPEN_FILES = 8192


def load_images(
    config: ServeConfig, model: Model, runner: Runner, tokenizer: Tokenizer, placement: Placement
) -> Images | None:
    """Load what reads images, if they are served; imports transformers then, for seconds."""
    family = vision_family(model.checkpoint.fields)
    if family is None:
        if config.encoder_cache_tokens is not None:
            raise StartupError("--encoder-cache-tokens: images are not served for this model; leave it out")
        return None
    raise_open_files(_OPEN_FILES)
    quiet()
    directory, dtype = model.checkpoint.directory, placement.dtype
    tower: SeesImages
    reserve = 0
    if isinstance(runner, StatefulRunner):
        tower, reserve = CrossTower(runner, family, tokenizer), runner.image_reserve
    else:
        with torch.inference_mode():
            tower = load_tower(
                directory, model.config.model_type, family, placement.device, dtype, model.checkpoint.other
            )
    ranks = placement.ranks
    together = ranks.tensor if ranks.layout.stage.size == 1 else ranks.world
    encoder = ImageEncoder(tower, config.encoder_cache_tokens, together, sample_images(directory, dtype))
    return Images(encoder, runner.vocab_size, reserve=reserve)
