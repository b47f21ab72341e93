"""Llama 4's image processor: numbers of transformers' own (on torchvision), and what its settings may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pictures import pixels

from wire.images.llama4 import Llama4Processor

TINY: dict[str, Any] = {"max_patches": 4, "size": {"height": 56, "width": 56}}
# One level of 255, and the bfloat16 that it is rounded to.
LEVEL = 1.5 / 127.5

# Settings, height x width, rows and columns of tiles, the mean of each tile, and value i of tile i, channel i, row
# 37 i, column 53 i + 5, each modulo what there is. transformers 5.23 with torchvision 0.28.
GOLDEN: list[tuple[dict[str, Any], tuple[int, int], tuple[int, int], list[float], list[float]]] = [
    ({}, (480, 640), (2, 2), [-0.169, -0.094, -0.571, -0.611, -0.061],
     [-0.371, 0.547, -0.703, 0.484, -1.0, -1.0, -1.0, -1.0]),
    ({}, (1080, 1920), (3, 5),
     [0.001, -0.221, -0.147, 0.002, 0.001, 0.002, -0.303, -0.202, 0.002, 0.001, -0.186, -0.186, -0.187, -0.187, -0.186,
      -0.061],
     [-0.633, -0.121, -0.293, 0.391, -0.395, -0.41, -0.664, -0.145]),
    ({}, (100, 1000), (1, 3), [-0.722, -0.738, -0.709, -0.063], [-1.0, -0.578, -1.0, -1.0, -1.0, -1.0, -0.41, -1.0]),
    ({}, (20, 30), (1, 1), [-0.329], [0.695, -1.0, -0.27, -0.434, -0.176, -0.602, -1.0, -1.0]),
    (TINY, (1345, 1345), (2, 2), [-0.246, 0.001, 0.001, 0.002, -0.061],
     [-0.316, 0.102, -0.496, -0.004, 0.125, -0.48, -0.199, -0.051]),
    (TINY | {"resize_to_max_canvas": True}, (40, 30), (2, 2), [-0.015, -0.525, -0.198, -0.526, -0.088],
     [-0.223, 0.062, -1.0, 0.508, -0.191, -1.0, 0.273, -1.0]),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "size", "canvas", "means", "values"), GOLDEN)
def test_numbers_of_transformers(
    settings: dict[str, Any], size: tuple[int, int], canvas: tuple[int, int], means: list[float], values: list[float]
) -> None:
    made = Llama4Processor(settings)([pixels(*size)])
    tiles = made["pixel_values"]
    assert made["aspect_ratios"].tolist() == [list(canvas)] and tiles.dtype == np.float32
    assert tiles.mean((1, 2, 3)) == pytest.approx(means, abs=0.002)
    side = tiles.shape[-1]
    picked = [tiles[i % len(tiles), i % 3, 37 * i % side, (53 * i + 5) % side] for i in range(1, 9)]
    assert picked == pytest.approx(values, abs=LEVEL)


def test_a_canvas_is_enlarged_least_or_shrunk_least_and_then_the_smallest() -> None:
    """Against all canvases, with exact fractions, on sizes that no rounding decides."""
    processor = Llama4Processor({})
    canvases = [(rows, columns) for rows in range(1, 17) for columns in range(1, 17) if rows * columns <= 16]
    generator = np.random.default_rng(0)
    for height, width in generator.integers(1, 6000, (300, 2)).tolist():
        scales = {(r, c): min(r * 336 / height, c * 336 / width) for r, c in canvases}
        enlarging = [scale for scale in scales.values() if scale >= 1]
        best = min(enlarging) if enlarging else max(scales.values())
        fitting = [one for one, scale in scales.items() if scale == pytest.approx(best, rel=1e-12)]
        assert processor.canvas(height, width) == min(fitting, key=lambda one: one[0] * one[1])


def test_settings_come_from_the_models_folder(tmp_path: Path) -> None:
    """Also as newer files have them, beside those of the tokenizer."""
    with pytest.raises(OSError, match="preprocessor_config"):
        Llama4Processor.from_folder(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": TINY}))
    made = Llama4Processor.from_folder(tmp_path)([pixels(30, 200)])
    assert made["pixel_values"].shape == (5, 3, 56, 56)


@pytest.mark.parametrize(
    "settings", [{"do_resize": False}, {"do_normalize": False}, {"size": {"height": 336, "width": 224}}]
)
def test_settings_that_are_not_served(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not s"):
        Llama4Processor(settings)
