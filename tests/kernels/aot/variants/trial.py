"""What the kernels of `model_server.kernels.trial` are compiled for."""

from __future__ import annotations

from aot.variant import Variant
from model_server.kernels.trial import _WRITTEN, write_constant


def variants() -> list[Variant]:
    """The only form."""
    return [Variant(name="trial", kernel=write_constant, signature={"out": "*i32"}, constants={"VALUE": _WRITTEN})]
