"""The parts of stages that run as several processes at once. Apart from the modules, which import torch."""

from __future__ import annotations

PARTS: dict[str, tuple[str, ...]] = {
    "S1": ("paged decode", "paged prefill", "element-wise", "sampling", "experts", "products"),
}
