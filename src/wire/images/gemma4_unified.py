"""Gemma 4 Unified's image processor, without torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

_PATCH_SIZE, _KERNEL = 16, 3
"""What the settings need not say."""


def gemma4_unified_processor(folder: Path) -> Any:
    """Read a folder's settings; raises OSError and ValueError."""
    settings, _ = ImageProcessingMixin.get_image_processor_dict(folder, local_files_only=True)
    settings = {name: value for name, value in settings.items() if value is not None and name != "image_processor_type"}
    # A kernel's patches, line by line, are the pixels of one patch of their size; images are scaled to the same sizes.
    side = int(settings.pop("patch_size", _PATCH_SIZE)) * int(settings.pop("pooling_kernel_size", _KERNEL))
    return Gemma4ImageProcessorPil(**settings, patch_size=side, pooling_kernel_size=1)
