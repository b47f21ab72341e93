"""What the towers are given: counts of public settings, layouts, arrays in the model's dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.pictures import picture
from support.vision_settings import SETTINGS, settings_folder

from wire.images.decoding import ImageError
from wire.images.families import FAMILIES, family_name
from wire.images.preparing import Preparer, UnpreparableError, feature_of

SIZES = ((224, 224), (480, 640), (768, 1024), (1080, 1920), (100, 1000))
# Rows of the tower, by height x width in the order of SIZES.
COUNTS = {
    "qwen2_vl": (64, 391, 999, 2691, 144),
    "qwen2_5_vl": (64, 391, 999, 2691, 144),
    "qwen2_5_omni_thinker": (64, 391, 999, 2691, 144),
    "qwen3_omni_moe_thinker": (64, 300, 768, 2040, 93),
    "glm4v": (64, 391, 999, 2691, 144),
    "glm46v": (64, 391, 999, 2691, 144),
    "glm4v_moe": (64, 391, 999, 2691, 144),
    "qwen3_5": (64, 300, 768, 2040, 93),
    "qwen3_5_moe": (64, 300, 768, 2040, 93),
    "qwen3_vl": (64, 300, 768, 2040, 93),
    "llava": (576,) * 5,
    "llava_next": (1176, 2340, 2340, 1948, 1160),
    "llava_next_video": (1176, 2340, 2340, 1948, 1160),
    "llava_onevision": (1485, 2929, 4725, 7269, 1467),  # what LlavaOnevisionProcessor counts
    "vipllava": (576,) * 5,
    "deepseek_vl": (576,) * 5,
    "aya_vision": tuple(169 * tiles for tiles in (1, 13, 13, 9, 11)),
    "qwen3_vl_moe": (64, 300, 768, 2040, 93),
    "idefics2": (320,) * 5,
    "idefics3": (2873, 2197, 2197, 2197, 845),
    "smolvlm": (1088, 832, 832, 832, 320),
    "pixtral": (196, 1200, 3072, 2304, 441),
    "mistral3": (64, 414, 1036, 1705, 144),
    "internvl": tuple(256 * tiles for tiles in (1, 13, 13, 9, 11)),
    "llama4": (144, 720, 1872, 2304, 576),
    "idefics": (1,) * 5,
    "mllama": (1,) * 5,
    "paligemma": (256,) * 5,
    "gemma3": (256,) * 5,
    "gemma4": (256, 266, 266, 264, 260),
    "gemma4_unified": (256, 266, 266, 264, 260),
}
QUICK = ((224, 224), (100, 1000))
MAX_PIXELS = 50_000_000


@pytest.fixture(scope="module")
def preparers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Preparer]:
    made: dict[str, Preparer] = {}
    for name in SETTINGS:
        folder = settings_folder(tmp_path_factory.mktemp(name), name)
        made[name] = Preparer(folder, "float32")
    return made


def counted(preparer: Preparer, height: int, width: int) -> int:
    image = preparer.prepare(b"k" * 32, picture(height, width), max_pixels=MAX_PIXELS)
    return image.num_embeds


def test_every_family_that_is_prepared_has_settings_here() -> None:
    assert set(SETTINGS) == set(COUNTS) == set(FAMILIES)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_public_settings(name: str, preparers: dict[str, Preparer]) -> None:
    for size in QUICK:
        assert counted(preparers[name], *size) == COUNTS[name][SIZES.index(size)]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in COUNTS if len(set(COUNTS[name])) > 1 and name != "qwen2_5_vl"])
def test_counts_of_all_sizes(name: str, preparers: dict[str, Preparer]) -> None:
    assert tuple(counted(preparers[name], *size) for size in SIZES) == COUNTS[name]


@pytest.mark.parametrize(
    ("size", "count"), [((20, 20), 1176), ((640, 640), 2928), ((899, 1024), 2634), ((1024, 899), 2640)]
)
def test_llava_next_leaves_out_what_only_pads_a_tile(
    size: tuple[int, int], count: int, preparers: dict[str, Preparer]
) -> None:
    assert counted(preparers["llava_next"], *size) == count


@pytest.mark.parametrize("name", COUNTS)
def test_the_expansion_has_as_many_image_tokens_as_the_tower_has_rows(
    name: str, preparers: dict[str, Preparer]
) -> None:
    for size in ((100, 1000), (30, 40)):
        image = preparers[name].prepare(b"k" * 32, picture(*size), max_pixels=MAX_PIXELS)
        assert image.expansion.count(FAMILIES[name].image_token) == image.num_embeds
        assert (image.grid is not None) == (FAMILIES[name].positions == "mrope")
        if image.grid is not None:
            assert np.prod(image.grid) == image.num_embeds


@pytest.mark.parametrize(("size", "tiles"), [((224, 224), 1), ((480, 640), 2), ((768, 1024), 4), ((100, 1000), 2)])
def test_mllama_names_the_tiles_that_show_the_image(
    size: tuple[int, int], tiles: int, preparers: dict[str, Preparer]
) -> None:
    image = preparers["mllama"].prepare(b"k" * 32, picture(*size), max_pixels=MAX_PIXELS)
    assert image.features["pixel_values"].shape == (1, 1, 4, 3, 560, 560)
    mask = image.features["aspect_ratio_mask"]
    assert (mask.dtype, mask.data) == ("bool", bytes([1] * tiles + [0] * (4 - tiles)))


def test_pixtrals_lines_have_a_token_behind_each(preparers: dict[str, Preparer]) -> None:
    image = preparers["pixtral"].prepare(b"k" * 32, picture(100, 1000), max_pixels=MAX_PIXELS)
    assert image.expansion.count("[IMG_BREAK]") == 6 and image.expansion.endswith("[IMG][IMG_END]")


def test_what_a_model_cannot_read_is_an_error_of_that_image(preparers: dict[str, Preparer]) -> None:
    for name, size in (("idefics2", (1, 1)), ("qwen2_vl", (1, 4000)), ("pixtral", (1, 4000)), ("glm4v", (4000, 1))):
        with pytest.raises(ImageError, match="pixels"):
            counted(preparers[name], *size)


@pytest.mark.parametrize("name", ["llava", "llava_next", "idefics3", "gemma3", "internvl"])
def test_thin_images_are_read_by_the_others(name: str, preparers: dict[str, Preparer]) -> None:
    for size in ((1, 1), (3, 3), (40, 12)):
        assert counted(preparers[name], *size) > 0


def test_pixels_come_in_the_models_dtype_as_torch_rounds() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 50)).astype(np.float32)
    for name in ("float32", "float16", "bfloat16"):
        dtype = getattr(torch, name)
        feature = feature_of(values, name)
        assert feature.shape == values.shape and feature.dtype == name
        read = torch.frombuffer(bytearray(feature.data), dtype=dtype).view(values.shape)
        assert torch.equal(read, torch.from_numpy(values).to(dtype))


def test_masks_are_bools_and_sizes_whole_numbers() -> None:
    assert feature_of(np.ones((1, 2, 3), np.int64), "bfloat16").dtype == "bool"
    sizes = feature_of(np.array([[1, 0]]), "bfloat16")
    assert (sizes.dtype, sizes.shape, sizes.data) == ("int64", (1, 2), np.array([[1, 0]]).tobytes())


def test_models_without_a_row_or_a_processor_say_so(tmp_path: Path) -> None:
    folder = settings_folder(tmp_path, "llava")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UnpreparableError, match="image processor"):
        Preparer(folder, "float32")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnpreparableError, match="llama"):
        Preparer(folder, "float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(UnpreparableError, match="config"):
        Preparer(folder, "float32")


def test_the_family_of_the_settings_is_that_of_the_table() -> None:
    assert {name: family_name(config) for name, (config, _) in SETTINGS.items()} == {name: name for name in SETTINGS}
