"""Which types are compared, and what is known to differ, with the reason."""

from __future__ import annotations

from model_server.models.families import FAMILIES

# Their modelling is in the models' own repositories, or is another type's.
NOT_OF_TRANSFORMERS = ("RefinedWeb", "RefinedWebModel", "baichuan")
TYPES = tuple(sorted(set(FAMILIES) - set(NOT_OF_TRANSFORMERS)))

KNOWN: dict[tuple[str, str], str] = {
    ("mpt", "logit_scale"): "as in the models' own code, which transformers' port passes over",
}
"""(type, field) -> why the tokens may differ."""


def is_known(model_type: str, field: str) -> bool:
    """Whether the difference has a reason."""
    return (model_type, field) in KNOWN
