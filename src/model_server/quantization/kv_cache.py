"""The KV cache in float8: types, and scales from the checkpoint."""

from __future__ import annotations

import logging
import math

import torch

from model_server.weights.reader import WeightReader

logger = logging.getLogger(__name__)

# What `--kv-cache-dtype` accepts.
DTYPES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

# Below an attention module, the first that there is: of vLLM's files, older ones with one scale for both, and those of
# compressed-tensors, modelopt and quark.
_KEY_SCALES = ("k_scale", "kv_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
_VALUE_SCALES = ("v_scale", "kv_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale")


class CacheScales:
    """What keys and values are divided by in e4m3, by layer."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader
        self._num_found = 0
        self._vectors: list[str] = []
        self._unusable: list[str] = []

    def of(self, module: str) -> tuple[float, float]:
        """Return a module's (key_scale, value_scale), 1 by default, the same on every rank."""
        return self._scale(module, _KEY_SCALES), self._scale(module, _VALUE_SCALES)

    def report(self) -> None:
        """Say in few lines what was found."""
        if self._vectors:
            logger.info(
                "Scales of the KV cache that have several numbers: %d (the first is %s); the largest of each is used",
                len(self._vectors),
                self._vectors[0],
            )
        if self._unusable:
            logger.warning(
                "Scales of the KV cache that are not positive and finite: %d (the first is %s); 1 is used instead",
                len(self._unusable),
                self._unusable[0],
            )
        logger.info("KV cache in float8_e4m3fn: %d scales are from the checkpoint, the others are 1", self._num_found)

    def _scale(self, module: str, names: tuple[str, ...]) -> float:
        name = next((f"{module}.{n}" for n in names if self._reader.has(f"{module}.{n}")), None)
        if name is None:
            return 1.0
        numbers = self._reader.raw(name).float()
        if numbers.numel() > 1:
            self._vectors.append(name)
        scale = float(numbers.max()) if numbers.numel() else math.nan
        if not 0 < scale < math.inf:
            self._unusable.append(name)
            return 1.0
        self._num_found += 1
        return scale
