"""Arrays of images and their places."""

from __future__ import annotations

from typing import Any

import pytest

from wire.images.prepared import Feature, ImagePlace, PreparedImage


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [("float32", (2, 3), 24), ("bfloat16", (2, 3), 12), ("int64", (1, 3), 24), ("bool", (4,), 4), ("float16", (), 2)],
)
def test_an_array_has_the_bytes_of_its_shape(dtype: Any, shape: tuple[int, ...], num_bytes: int) -> None:
    assert Feature(dtype, shape, bytes(num_bytes)).shape == shape
    with pytest.raises(ValueError, match="bytes where its shape needs"):
        Feature(dtype, shape, bytes(num_bytes + 1))


@pytest.mark.parametrize(("dtype", "shape"), [("float64", (1,)), ("float32", (0,)), ("float32", (-1, -1))])
def test_types_and_shapes_that_cannot_be_are_refused(dtype: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="an array of an image has"):
        Feature(dtype, shape, bytes(4))


def test_an_image_knows_its_memory() -> None:
    feature = Feature("float32", (2,), bytes(8))
    assert PreparedImage(b"k" * 32, "<image>", 1, None, {"pixel_values": feature}).num_bytes == 15


def test_a_place_knows_its_end() -> None:
    assert ImagePlace(b"k", 3, 4).stop == 7
