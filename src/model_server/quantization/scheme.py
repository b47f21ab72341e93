"""What the config of a checkpoint says of its quantization. The one place that refuses what is not served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_server.errors import StartupError


@dataclass(frozen=True, slots=True)
class Quantization:
    """method: as configs name it; `unknown` where they do not say."""

    method: str


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """How the weights beside this config.json are quantized; None: they are plain."""
    block = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(block, Mapping):
        return None
    return Quantization(method=str(block.get("quant_method", "unknown")))


def check_served(quantization: Quantization | None) -> None:
    """Raises StartupError for quantized weights: no format of `formats.FORMATS` reads them yet."""
    if quantization is not None:
        raise StartupError(f"the checkpoint is quantized ({quantization.method}), which this version does not serve")
