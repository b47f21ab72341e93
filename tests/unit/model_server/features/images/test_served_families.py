"""The tables of models whose images are served: of the tower, of the prompt, and of layers of cross attention."""

from __future__ import annotations

from model_server.features.images.families import FAMILIES
from model_server.models.config import CROSSING
from model_server.models.hf.crossing import KINDS
from wire.images.families import FAMILIES as PROMPTS


def test_prompts_and_towers_are_known_of_the_same_models() -> None:
    """Those of Pixtral are written otherwise, within Llava."""
    assert set(PROMPTS) == {*FAMILIES, "pixtral"}


def test_models_with_cross_attention_are_known_alike() -> None:
    assert set(KINDS) == set(CROSSING) == {name for name, family in FAMILIES.items() if family.crosses}
