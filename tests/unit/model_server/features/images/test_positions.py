"""Positions of tokens behind and within images whose positions have three parts."""

from __future__ import annotations

import numpy as np
import pytest

from model_server.errors import RequestError
from model_server.features.images.families import FAMILIES
from model_server.features.images.image import Feature, Image, ImagePlace
from model_server.features.images.placed import PromptImages

TOKEN = 9
FAMILY = FAMILIES["qwen2_vl"]
FEATURES = {name: Feature("bool", (1,), b"1") for name in FAMILY.features}


def prompt(*grids: tuple[int, ...]) -> PromptImages:
    """Two tokens of text before, between and behind images."""
    ids, places = [1, 1], []
    for number, grid in enumerate(grids):
        count = int(np.prod(grid))
        image = Image(bytes([number]) * 32, FEATURES, count, grid)
        places.append(ImagePlace(image.key, len(ids), count, image))
        ids += [TOKEN] * count + [1, 1]
    return PromptImages(FAMILY, places, ids, TOKEN)


def test_an_image_counts_by_its_longer_side() -> None:
    images = prompt((1, 2, 3), (1, 1, 1))
    assert images.positions(0, 15).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9, 10, 11],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    ]
    assert images.offset == -3


def test_any_part_of_the_prompt_and_what_is_generated_has_the_same_positions() -> None:
    images = prompt((1, 2, 3), (1, 4, 2))
    whole = images.positions(0, 30)
    for start in range(30):
        for stop in range(start + 1, 31):
            assert (images.positions(start, stop) == whole[:, start:stop]).all()
            if not images.has_sections(start, stop):
                expected = np.arange(start, stop) + images.offset_at(start)
                assert (whole[:, start:stop] == expected).all(), (start, stop)


def test_a_grid_that_does_not_fit_is_an_error() -> None:
    for grid in ((), (2, 3), (1, 2, 3, 1)):
        with pytest.raises(RequestError, match="for a grid of"):
            prompt(grid)
    split = ImagePlace(b"k" * 32, 1, 3, Image(b"k" * 32, FEATURES, 2, (1, 1, 2)))
    with pytest.raises(RequestError, match="do not follow"):
        PromptImages(FAMILY, [split], [1, TOKEN, 1, TOKEN], TOKEN)
