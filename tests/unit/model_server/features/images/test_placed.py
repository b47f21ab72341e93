"""Where images stand in a prompt: which tokens they are, in runs, and what does not fit."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from model_server.errors import RequestError
from model_server.features.images.families import FAMILIES
from model_server.features.images.image import Encoded, Feature, Image, ImagePlace
from model_server.features.images.placed import PromptImages, check_places
from wire.processes.shared_memory import SharedBytes, SharedMemory

TOKEN = 9
PIXELS = Feature("float32", (1, 2), b"\0" * 8)


def image(num_embeds: int, key: int = 1) -> Image:
    return Image(bytes([key]) * 32, {"pixel_values": PIXELS}, num_embeds)


def placed(ids: list[int], *places: ImagePlace) -> PromptImages:
    return PromptImages(FAMILIES["llava"], places, ids, TOKEN)


def test_rows_go_to_the_image_tokens_of_any_part_of_the_prompt() -> None:
    random.seed(0)
    for _ in range(50):
        span = [random.choice((TOKEN, TOKEN, 3)) for _ in range(random.randint(1, 12))] + [TOKEN]
        ids = [1, 2, *span, TOKEN, 4]  # the last image token is outside of the place
        start, count = 2, span.count(TOKEN)
        images = placed(ids, ImagePlace(b"k" * 32, start, len(span), image(count)))
        for wanted in images.wanted(0, len(ids)):
            wanted.encoded = Encoded(torch.arange(count)[:, None].float() + 1)
        assert images.wanted(0, len(ids)) == []
        expected = [0.0] * len(ids)
        rows = iter(range(1, count + 1))
        for offset, token in enumerate(span):
            if token == TOKEN:
                expected[start + offset] = next(rows)
        first = random.randint(0, len(ids) - 1)
        last = random.randint(first + 1, len(ids))
        found = [0.0] * (last - first)
        for token, part, _ in images.spans(first, last):
            found[token : token + len(part)] = part[:, 0].tolist()
        assert found == expected[first:last]


def test_an_image_is_let_go_behind_its_last_token() -> None:
    ids = [1, TOKEN, TOKEN, 2, TOKEN, 3]
    images = placed(ids, ImagePlace(b"a" * 32, 1, 2, image(2)), ImagePlace(b"b" * 32, 4, 1, image(1, 2)))
    first, second = images.wanted(0, 6)
    assert images.wanted(3, 4) == [] and images.wanted(2, 3) == [first]
    first.encoded = Encoded(torch.zeros(2, 1))
    images.pass_by(2)
    assert first.encoded is not None
    images.pass_by(3)
    assert first.encoded is None and images.wanted(0, 6) == [second]


def test_arrays_are_let_go_when_they_are_encoded() -> None:
    """Each may be an open file, and a request lasts much longer."""
    memory = SharedMemory.create()
    memory.write(0, b"\0" * 8)
    name = memory.name
    pixels = Feature("float32", (1, 2), SharedBytes(memory, 0, 8))
    images = placed([1, TOKEN, 2], ImagePlace(b"a" * 32, 1, 1, Image(b"a" * 32, {"pixel_values": pixels}, 1)))
    del memory, pixels
    SharedMemory.open(name)
    (one,) = images.wanted(0, 3)
    one.encode(lambda image: Encoded(image.features["pixel_values"].tensor()))
    with pytest.raises(OSError, match=r".*"):
        SharedMemory.open(name)
    assert images.spans(0, 3)[0][1].tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("places", "cached", "said"),
    [
        ([(1, 0)], 0, "in order, apart"),
        ([(5, 2)], 0, "in order, apart"),
        ([(3, 1), (1, 1)], 0, "in order, apart"),
        ([(1, 2), (2, 1)], 0, "in order, apart"),
        ([(1, 2)], 2, "was not sent"),
    ],
)
def test_places_that_do_not_fit(places: list[tuple[int, int]], cached: int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check_places(1, [ImagePlace(b"k" * 32, a, n, None if cached else image(1)) for a, n in places], 6, cached)
    with pytest.raises(RequestError, match="key"):
        check_places(1, [ImagePlace(b"k", 1, 1, image(1))], 6, 0)
    check_places(1, [ImagePlace(b"k" * 32, 1, 2, None)], 6, 3)  # all of it is in the cache


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_embeds": 3}, "3 embeddings for 2 image tokens"),
        ({"features": {"pixel_values": PIXELS, "x": PIXELS}}, "features"),
        ({"features": {"x": PIXELS}}, "this model reads"),
        ({"features": {"pixel_values": dataclasses.replace(PIXELS, dtype="float8")}}, "type 'float8'"),
        ({"features": {"pixel_values": dataclasses.replace(PIXELS, shape=(3,))}}, "8 bytes for shape"),
        ({"features": {"pixel_values": Feature("float32", (0,), b"")}}, "0 bytes for shape"),
    ],
)
def test_images_that_do_not_fit(changes: dict[str, object], said: str) -> None:
    bad = dataclasses.replace(image(2), **changes)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=said):
        placed([1, TOKEN, TOKEN], ImagePlace(b"k" * 32, 1, 2, bad))


def test_tokens_of_an_image_or_of_the_whole_prompt_see_ahead() -> None:
    ids = [1, TOKEN, TOKEN, TOKEN, 2, 3]
    place = ImagePlace(b"k" * 32, 1, 3, image(3))
    of_image = PromptImages(FAMILIES["gemma3"], [place], ids, TOKEN)
    assert of_image.whole == [(1, 4)] and of_image.offset == 0
    assert of_image.reach(4, 6) is None
    seen = of_image.reach(2, 6)
    assert seen is not None and [part.tolist() for part in seen] == [[3, 3, 4, 5], [-1] * 4]
    of_prompt = PromptImages(FAMILIES["paligemma"], [], ids, TOKEN)
    assert of_prompt.whole == [] and of_prompt.offset == 1 and of_prompt.reach(6, 9) is None
    seen = of_prompt.reach(0, 8)  # with two tokens from before a preemption
    assert seen is not None and [part.tolist() for part in seen] == [[5] * 6 + [6, 7], [0] * 6 + [-1] * 2]
    assert placed(ids, place).reach(0, 6) is None and placed(ids, place).whole == []
