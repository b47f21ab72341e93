"""Images of the warm-up: their sizes, and that they are what requests bring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.vision_settings import settings_folder

from model_server.features.images.encoder import SampleImages, sample_images


def samples(folder: Path, name: str) -> SampleImages:
    made = sample_images(settings_folder(folder, name), torch.bfloat16)
    assert made is not None
    return made


def test_the_largest_is_as_large_as_a_prompt_may_be(tmp_path: Path) -> None:
    """Of the sizes tried one has at most half the tokens of the next: more than half of what fits is used."""
    qwen = samples(tmp_path, "qwen2_vl")
    image = qwen.largest(600)
    assert 300 < image.num_embeds <= 600 and image.grid and image.features["pixel_values"].dtype == "bfloat16"
    assert qwen.small().num_embeds < 20


@pytest.mark.parametrize(("name", "tokens"), [("llava", 576), ("internvl", 256 * 13), ("llama4", 144 * 17)])
def test_the_largest_of_a_family_with_a_bound(name: str, tokens: int, tmp_path: Path) -> None:
    assert samples(tmp_path, name).largest(100_000).num_embeds == tokens


def test_one_that_no_prompt_can_hold_is_tried_all_the_same(tmp_path: Path) -> None:
    """Requests with it are refused; the tower is not."""
    assert samples(tmp_path, "gemma3").largest(100).num_embeds == 256


def test_without_a_processor_there_are_none(tmp_path: Path) -> None:
    folder = settings_folder(tmp_path, "llava")
    (folder / "preprocessor_config.json").unlink()
    assert sample_images(folder, torch.float32) is None
