"""What is encoded is kept while it is needed, and as long as there is room."""

from __future__ import annotations

import random

import torch

from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.families import FAMILIES
from model_server.features.images.image import Encoded, EncodedImages, Image


class CountingTower:
    """Rows that say which image they are of."""

    family = FAMILIES["llava"]
    image_token = 9
    row_bytes = 4

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, image: Image) -> Encoded:
        self.encoded.append(image.key[0])
        return Encoded(torch.full((image.num_embeds, 1), float(image.key[0])))


def image(number: int, rows: int = 4) -> Image:
    return Image(bytes([number]) * 32, {}, rows)


def test_the_longest_unused_goes_first() -> None:
    tower = CountingTower()
    encoder = ImageEncoder(tower, 8)
    for number in (1, 2, 1, 3, 1, 2):
        assert encoder.find(image(number)).rows[0] == number
    assert tower.encoded == [1, 2, 3, 2]
    assert (encoder.hits, encoder.misses, encoder.num_rows) == (2, 4, 8)
    told = encoder.take_counts()
    assert told is not None and (told.hits, told.misses) == (2, 4) and told.encode_ns > 0
    assert encoder.take_counts() is None
    encoder.find(image(2))
    assert encoder.take_counts() == EncodedImages(hits=1)


def test_what_a_request_needs_is_encoded_once_however_little_room_there_is() -> None:
    random.seed(1)
    tower = CountingTower()
    encoder = ImageEncoder(tower, 8)
    needed = {number: encoder.find(image(number)) for number in (1, 2, 3)}
    for _ in range(30):
        number = random.randint(1, 6)
        found = encoder.find(image(number))
        assert found is needed.get(number, found)
    assert [tower.encoded.count(number) for number in (1, 2, 3)] == [1, 1, 1]
    needed.clear()
    del found
    encoder.find(image(7))
    assert encoder.num_rows <= 8


def test_an_image_larger_than_the_room_is_held_alone() -> None:
    encoder = ImageEncoder(CountingTower(), 3)
    encoder.find(image(1))
    encoder.find(image(2))
    assert encoder.num_rows == 4


def test_a_new_router_finds_nothing_and_sets_the_room_unless_it_was_asked_for() -> None:
    tower = CountingTower()
    encoder = ImageEncoder(tower)
    encoder.start(10)
    assert encoder.capacity == 20
    encoder.find(image(1))
    encoder.start(30)
    encoder.find(image(1))
    assert tower.encoded == [1, 1] and encoder.capacity == 60
    asked = ImageEncoder(tower, 5)
    asked.start(30)
    assert asked.capacity == 5
