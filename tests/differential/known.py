"""Which types are compared, and what is known to differ, with the reason."""

from __future__ import annotations

from model_server.models.families import FAMILIES
from model_server.models.families.vision import TEXT_TYPES

# Their modelling is in the models' own repositories, or is another type's.
NOT_OF_TRANSFORMERS = ("RefinedWeb", "RefinedWebModel", "baichuan")
# Prompts of PaliGemma are not causal; the others read nothing without a picture.
NOT_ALONE = ("paligemma", "blip-2", "instructblip", "instructblipvideo")
VISION_TYPES = tuple(sorted(set(TEXT_TYPES) - set(NOT_ALONE)))
TYPES = (*sorted(set(FAMILIES) - set(NOT_OF_TRANSFORMERS)), *VISION_TYPES)

KNOWN: dict[tuple[str, str], str] = {
    ("mpt", "attn_config.alibi_bias_max"): "as in the models' own code; transformers' port always takes 8",
    ("nemotron_h", "time_step_limit"): "as in the models' own code, which transformers' port passes over",
    ("mpt", "logit_scale"): "as in the models' own code, which transformers' port passes over",
}
"""(type, field) -> why the tokens may differ."""


def is_known(model_type: str, field: str) -> bool:
    """Whether the difference has a reason."""
    return (model_type, field) in KNOWN
