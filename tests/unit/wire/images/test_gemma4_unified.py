"""Gemma 4 Unified's image processor: numbers of transformers' own, whose resizing is torch's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.pictures import pixels

from wire.images.gemma4_unified import gemma4_unified_processor

# Two levels of 255: Pillow rounds twice.
LEVELS = 2.5 / 255

# Height x width, tokens, place of the last one, the mean, and value 997 i of patch 7 i, each modulo what there is.
# transformers 5.24 with torch 2.13.
GOLDEN = [
    ((480, 640), 266, [18, 13], 0.4688, [0.506, 0.2, 0.49, 0.545, 0.169, 0.647, 0.224, 0.753]),
    ((1080, 1920), 264, [21, 11], 0.4688, [0.204, 0.769, 0.847, 0.784, 0.153, 0.192, 0.616, 0.149]),
    ((100, 1000), 260, [51, 4], 0.4683, [0.682, 0.839, 0.412, 0.169, 0.38, 0.149, 0.247, 0.212]),
    ((20, 30), 260, [19, 12], 0.5034, [0.706, 0.792, 0.647, 0.549, 0.851, 0.753, 0.435, 0.812]),
]


@pytest.mark.parametrize(("size", "count", "last", "mean", "values"), GOLDEN)
def test_numbers_of_transformers(
    size: tuple[int, int], count: int, last: list[int], mean: float, values: list[float], tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16, "do_normalize": False}))
    made = gemma4_unified_processor(tmp_path)([pixels(*size)], return_tensors="np", input_data_format="channels_last")
    patches, places = made["pixel_values"][0], made["image_position_ids"][0]
    assert patches.shape == (280, 48 * 48 * 3) and list(made["num_soft_tokens_per_image"]) == [count]
    assert places[count - 1].tolist() == last and np.all(places[count:] == -1) and not patches[count:].any()
    assert patches[:count].mean() == pytest.approx(mean, abs=5e-4)
    picked = [patches[7 * i % count, 997 * i % patches.shape[1]] for i in range(1, 9)]
    assert picked == pytest.approx(values, abs=LEVELS)


def test_settings_come_from_the_models_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="preprocessor_config"):
        gemma4_unified_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}})
    )
    made = gemma4_unified_processor(tmp_path)([pixels(60, 60)], return_tensors="np", input_data_format="channels_last")
    assert made["pixel_values"].shape == (1, 70, 16 * 16 * 3) and list(made["num_soft_tokens_per_image"]) == [64]
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": 71}}))
    with pytest.raises(ValueError, match="max_soft_tokens"):
        gemma4_unified_processor(tmp_path)
