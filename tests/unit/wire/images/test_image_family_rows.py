"""What stands for an image in prompts: the texts of transformers' processors."""

from __future__ import annotations

import pytest

from wire.images.expansions import Layout
from wire.images.families import FAMILIES, family_name

F = "<fake_token_around_image>"
I = "<image>"  # noqa: E741


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        ("llava", Layout(3), I * 3),
        ("qwen2_vl", Layout(2), "<|image_pad|><|image_pad|>"),
        ("idefics2", Layout(2, per_tile=2), f"{F}{I}{I}{F}"),
        ("idefics2", Layout(4, per_tile=2), f"{F}{I}{I}{F}{F}{I}{I}{F}"),
        ("idefics3", Layout(1, per_tile=1), f"{F}<global-img>{I}{F}"),
        (
            "smolvlm",
            Layout(5, rows=2, columns=2, per_tile=1),
            f"{F}<row_1_col_1>{I}{F}<row_1_col_2>{I}\n{F}<row_2_col_1>{I}{F}<row_2_col_2>{I}\n\n{F}<global-img>{I}{F}",
        ),
        ("gemma3", Layout(2), "\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\n"),
        ("gemma4", Layout(2), "<|image><|image|><|image|><image|>"),
        ("internvl", Layout(2), "<img><IMG_CONTEXT><IMG_CONTEXT></img>"),
        ("pixtral", Layout(4, rows=2, columns=2), "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]"),
        ("mistral3", Layout(2, rows=1, columns=2), "[IMG][IMG][IMG_END]"),
        ("llama4", Layout(1, per_tile=1), "<|image_start|><|image|><|patch|><|image_end|>"),
        (
            "llama4",
            Layout(3, rows=1, columns=2, per_tile=1),
            "<|image_start|><|patch|><|tile_x_separator|><|patch|><|tile_y_separator|><|image|><|patch|><|image_end|>",
        ),
        ("llava_onevision", Layout(3), I * 3),
        ("aya_vision", Layout(1, per_tile=1), "<|START_OF_IMG|>TILE_GLOBAL<|IMG_PATCH|><|END_OF_IMG|>"),
        (
            "aya_vision",
            Layout(3, per_tile=1),
            "<|START_OF_IMG|>TILE_1<|IMG_PATCH|>TILE_2<|IMG_PATCH|>TILE_GLOBAL<|IMG_PATCH|><|END_OF_IMG|>",
        ),
        ("glm4v", Layout(2), "<|image|><|image|>"),
        ("paligemma", Layout(2), I * 2),
        ("mllama", Layout(1), "<|image|>"),
        ("idefics", Layout(1), f"{F}{I}{F}"),
    ],
)
def test_expansions(name: str, layout: Layout, expected: str) -> None:
    family = FAMILIES[name]
    assert family.expansion(layout) == expected
    assert expected.count(family.image_token) == layout.num_embeds


@pytest.mark.parametrize("name", FAMILIES)
def test_a_marker_holds_one_placeholder(name: str) -> None:
    assert FAMILIES[name].marker.count(FAMILIES[name].placeholder) == 1


def test_idefics2_has_one_token_between_tiles_and_a_blank_before_text() -> None:
    arrange = FAMILIES["idefics2"].arrange
    assert arrange(f"a{F}{I}{F}{F}{I}{F}b{F}{I}{F} c{F}{I}{F}", "<s>") == (f"a{F}{I}{F}{I}{F} b{F}{I}{F} c{F}{I}{F}")


def test_idefics_has_no_blanks_around_images_and_one_token_between_them() -> None:
    arrange = FAMILIES["idefics"].arrange
    assert arrange(f" a {F}{I}{F} {F}{I}{F} b ", "<s>") == f"a{F}{I}{F}{I}{F}b"
    assert arrange(" a b ", "<s>") == "a b"


def test_paligemma_has_bos_behind_the_last_image_and_a_newline_at_the_end() -> None:
    arrange = FAMILIES["paligemma"].arrange
    assert arrange(f"{I}{I}what?", "<bos>") == f"{I}{I}<bos>what?\n"
    assert arrange("what?", "<bos>") == "<bos>what?\n"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "llava"}, "llava"),
        ({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ({"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}, "llava"),
        ({"model_type": "qwen2_5_vl"}, "qwen2_5_vl"),
        ({"model_type": "gemma4", "vision_config": {}}, "gemma4"),
        ({"model_type": "gemma4_unified", "vision_config": None}, None),
        ({"model_type": "llama"}, None),
        ({"model_type": ["llava"]}, None),
        ({}, None),
    ],
)
def test_the_config_names_the_row(config: dict[str, object], name: str | None) -> None:
    assert family_name(config) == name
