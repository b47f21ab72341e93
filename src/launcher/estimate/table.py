"""What a model takes and what fits, by number of shards and quantization. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from launcher.config import LauncherConfig
from launcher.planning import memory
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.model_info import ModelInfo
from launcher.planning.plan import fits
from wire.quantization.methods import FOUR_BITS, Quantize

_COUNTS = (1, 2, 4, 8)
NEW_GPU = (9, 0)
"""Compute capability of a GPU that is not here: it can do all that is estimated."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to serve the model. Bytes; None: not known."""

    num_shard: int
    weights: str
    """How they are kept: plain, or by a method of quantization."""
    cache: str
    quantize: str | None
    """What `--quantize` asks for; None: it is left out."""
    kv_cache_dtype: str | None
    """What `--kv-cache-dtype` asks for; None: it is left out."""
    weight_bytes: int | None
    """Of each shard."""
    token_bytes: int | None
    """Of one token in the KV cache of each shard."""
    tokens: int | None
    """In the KV cache: on GPUs what fits beside the weights, activations not counted. 0: the weights do not fit."""

    most_requests: int | None = None
    """How many have room for what they keep beside the cache; None: they keep nothing."""

    def requests(self, length: int) -> int | None:
        """How many of so many tokens fit at once."""
        if self.tokens is None:
            return None
        count = self.tokens // length
        return count if self.most_requests is None else min(count, self.most_requests)


def rows(
    info: ModelInfo,
    hardware: Hardware,
    num_shard: int | None,
    *,
    capability: tuple[int, int] | None,
    available: int | None,
    kv_cache_memory: int | None = None,
) -> list[Row]:
    """Estimate `num_shard` shards, or all usual counts that divide the heads.

    Args:
        capability: Compute capability of the GPUs; None on a CPU.
        available: Bytes of each GPU, or free bytes of the machine.
        kv_cache_memory: The server's option.
    """
    if capability is None:
        hardware = dataclasses.replace(hardware, gpus=(), free_bytes=available)
    counts = [count for count in _COUNTS if capability or count == 1] if num_shard is None else [num_shard]
    return [
        _row(info, hardware, count, config, capability, available)
        for count in counts
        if fits(info, count)
        for config in _ways(info, hardware, capability, kv_cache_memory)
    ]


def _ways(
    info: ModelInfo, hardware: Hardware, capability: tuple[int, int] | None, kv_cache_memory: int | None
) -> list[LauncherConfig]:
    """List the ways to keep the weights: as they are, then smaller unless they are quantized."""
    on_gpu = capability is not None
    plain = LauncherConfig(kv_cache_memory=kv_cache_memory)
    plain = dataclasses.replace(plain, dtype="bfloat16" if on_gpu else memory.dtype_of(plain, info, hardware))
    ways = [plain]
    is_able = capability is None or capability >= memory.FLOAT8_CAPABILITY
    is_small_already = on_gpu and info.wants_float8_cache
    if info.latent is None and is_able and not is_small_already:
        ways.append(dataclasses.replace(plain, kv_cache_dtype="fp8_e4m3fn"))
    if info.quantization is None:
        quantized: tuple[Quantize, ...] = ("eetq", "bitsandbytes-nf4")
        ways += [dataclasses.replace(way, quantize=method) for method in quantized for way in ways]
    return ways


def _row(
    info: ModelInfo,
    hardware: Hardware,
    count: int,
    config: LauncherConfig,
    capability: tuple[int, int] | None,
    available: int | None,
) -> Row:
    gpus: tuple[Gpu, ...] = ()
    if capability is not None:
        gpu = Gpu(memory_mib=None if available is None else available >> 20, compute_capability=capability)
        gpus = (gpu,) * count
    found = memory.estimate(config, dataclasses.replace(hardware, gpus=gpus), info, count)
    too_large = capability is None and available is not None and (found.weights or 0) >= available
    plain = "32 bits" if config.dtype == "float32" else "16 bits"
    return Row(
        num_shard=count,
        weights=info.quantize or _bits(config.quantize) or plain,
        cache=plain if found.cache_type is None else "8 bits",
        quantize=config.quantize,
        kv_cache_dtype=config.kv_cache_dtype,
        weight_bytes=None if found.weights is None else found.weights // count,
        token_bytes=found.token,
        tokens=0 if too_large else found.tokens,
        most_requests=found.requests,
    )


def _bits(quantize: str | None) -> str | None:
    """What is left of each number; None: all."""
    if quantize is None:
        return None
    return "4 bits" if quantize in FOUR_BITS else "8 bits"
