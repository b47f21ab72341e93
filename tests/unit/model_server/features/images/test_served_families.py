"""The tables of models whose images are served: of the tower, of the prompt, and of layers of cross attention."""

from __future__ import annotations

import pytest

from model_server.features.images.families import FAMILIES, vision_family
from model_server.models.config import CROSSING
from model_server.models.hf.crossing import KINDS
from wire.images.families import FAMILIES as PROMPTS


def test_prompts_and_towers_are_known_of_the_same_models() -> None:
    """Those of Pixtral are written otherwise, within Llava."""
    assert set(PROMPTS) == {*FAMILIES, "pixtral"}


def test_models_with_cross_attention_are_known_alike() -> None:
    assert set(KINDS) == set(CROSSING) == {name for name, family in FAMILIES.items() if family.crosses}


@pytest.mark.parametrize(
    ("model_type", "text", "sight"),
    [
        ("gemma4", {}, None),
        ("gemma4", {"use_bidirectional_attention": None}, None),
        ("gemma4", {"use_bidirectional_attention": "vision"}, "image"),
        ("gemma4_unified", {}, "image"),
        ("gemma4_unified", {"use_bidirectional_attention": None}, None),
    ],
)
def test_only_some_models_of_gemma4_see_ahead(model_type: str, text: dict[str, object], sight: str | None) -> None:
    family = vision_family({"model_type": model_type, "text_config": text, "vision_config": {}})
    assert family is not None and family.sight == sight
    assert vision_family({"model_type": model_type, "text_config": text}) is None
