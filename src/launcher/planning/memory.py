"""Estimates weights and KV cache from config.json and file sizes, for defaults; shards measure themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.config import KEEP_MODEL_TYPE, Dtype, LauncherConfig
from launcher.group_config import num_nodes
from launcher.planning.adapters import NO_ADAPTERS, Listed, slot_bytes
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.model_info import ModelInfo
from wire.host import kv_memory
from wire.pooling.task import Task
from wire.quantization.methods import FOUR_BITS, ON_LOAD

FLOAT8_CAPABILITY = (8, 9)
"""GPUs from here on get an 8-bit cache where the checkpoint asks for one."""
_ROW_BYTES = 5
"""At most, of the scale and the zero point of a row of a matrix that is quantized on load."""
_BLOCK, _BLOCK_BYTES = 64, 36
"""Numbers that share a scale where a matrix is quantized on load to 4 bits, and their bytes with it."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the shards will take; None is unknown."""

    weights: int | None
    """Bytes of all shards together."""
    cache_type: str | None
    """Type of the numbers in the KV cache; None: the model's."""
    token: int | None
    """Bytes of one token in the KV cache of one shard."""
    cache: int | None
    """Bytes of the KV cache of one shard: what was asked for, or what it is on a CPU if nothing was."""
    tokens: int | None
    """Tokens that the KV cache holds. On a GPU the most that fit beside the weights of a shard and its slots for
    adapters, activations not counted; on a CPU, where nothing is measured, what the shards will say."""
    state: int = 0
    """Bytes that one shard keeps of a request beside its tokens in the KV cache."""
    requests: int | None = None
    """How many states are kept at once, of running requests and saved ones; None: nothing is kept."""


def estimate(
    config: LauncherConfig,
    hardware: Hardware,
    info: ModelInfo | None,
    num_shard: int,
    listed: Listed = NO_ADAPTERS,
    *,
    longest: int = 0,
) -> Estimate:
    """Estimate what `num_shard` shards take.

    Args:
        longest: Tokens of the longest request, as far as options say.
    """
    gpus = hardware.gpus[:num_shard]
    asked = cache_bytes(config, num_shard)
    if info is None:
        return Estimate(weights=None, cache_type=config.kv_cache_dtype, token=None, cache=asked, tokens=None)
    width = itemsize(config, info, hardware)
    weights = weight_bytes(info, config.quantize, width, on_gpu=bool(gpus))
    if task_of(config, info) != "generate":
        return Estimate(weights=weights, cache_type=None, token=None, cache=None, tokens=None)
    cache_type = cache_dtype(config, info, gpus[0] if gpus else None)
    stages = config.num_stage
    text = info.text if info.text is not None and not info.num_layers else info
    token = token_bytes(text, num_shard // stages, 1 if cache_type is not None else width)
    state = 0
    if text.mixers is not None and token is not None and text.hidden_size:
        ranks = num_shard // stages
        block = text.mixers.block_bytes(text.hidden_size, ranks, width, config.speculate or 0, kv_memory.BLOCK)
        token += block // kv_memory.BLOCK
        state = -(-text.mixers.state_bytes(ranks, width) // stages)
    token = token and -(-token // stages)
    sizes = [gpu.memory_mib << 20 for gpu in gpus if gpu.memory_mib]
    cache, tokens, requests = asked, None, None
    if gpus:
        if weights is not None and token is not None and sizes and len(sizes) == num_shard:
            free = int(min(sizes) * config.cuda_memory_fraction) - weights // num_shard
            free -= slot_bytes(config, info, num_shard // stages, width, listed) // stages
            requests = _state_slots(config, state, free // 2, on_gpu=True)
            free -= _states(state, requests)
            cached = max(0, free if asked is None else min(free, asked))
            uncached = kv_memory.UNCACHED_TOKENS if free > 0 else 0
            tokens = cached // token if token else uncached
    else:
        if weights is not None and hardware.free_bytes is not None:
            free = hardware.free_bytes - weights
            share = int(free * kv_memory.STATES_SHARE) // num_shard
            requests = _state_slots(config, state, share, on_gpu=False)
            if asked is None:
                cache = kv_memory.default_bytes(free - _states(state, requests) * num_shard) // num_shard
        if cache is not None and token is not None:
            tokens = _cpu_tokens(config, cache, token, longest)
    return Estimate(
        weights=weights,
        cache_type=cache_type,
        token=token,
        cache=cache,
        tokens=tokens,
        state=state,
        requests=requests,
    )


def task_of(config: LauncherConfig, info: ModelInfo | None) -> Task:
    """Return the task that is asked for, or the model's own."""
    if config.task != "auto":
        return config.task
    return "generate" if info is None else info.task


def _state_slots(config: LauncherConfig, state: int, share: int, *, on_gpu: bool) -> int | None:
    """Return the slots for states of `state` bytes; None without states."""
    if not state:
        return None
    return kv_memory.state_slots(config.state_slots, config.max_batch_size, share, state, on_gpu=on_gpu)


def _states(state: int, slots: int | None) -> int:
    """Return the bytes of all slots, with the one for the health probe."""
    return 0 if slots is None else state * (slots + 1)


def _cpu_tokens(config: LauncherConfig, cache: int, token: int, longest: int) -> int:
    """Return the tokens of a shard's cache on a CPU, of `cache` bytes and `token` bytes for each."""
    bound = config.max_batch_total_tokens
    if bound is not None:
        bound -= bound % kv_memory.BLOCK
    if config.kv_cache_memory is not None:
        tokens = kv_memory.tokens_in(cache, token)
        return tokens if bound is None else min(bound, tokens)
    return kv_memory.default_tokens(cache, token, longest) if bound is None else bound


def cache_bytes(config: LauncherConfig, num_shard: int) -> int | None:
    """Return the bytes that `--kv-cache-memory`, which is for one machine, gives each shard; None: it is not set."""
    memory = config.kv_cache_memory
    return None if memory is None else memory * num_nodes(config) // num_shard


def itemsize(config: LauncherConfig, info: ModelInfo, hardware: Hardware) -> int:
    """Return the bytes of a plain weight in memory."""
    return 4 if dtype_of(config, info, hardware) == "float32" else 2


def dtype_of(config: LauncherConfig, info: ModelInfo, hardware: Hardware) -> Dtype:
    """Return the type of weights and activations; a GPU may take the other 16-bit type."""
    if config.dtype is not None:
        return config.dtype
    if hardware.gpus:
        return "bfloat16"
    is_narrow = info.stored_type == "BF16" or (info.stored_type == "F16" and hardware.multiplies_bfloat16)
    return "bfloat16" if is_narrow else "float32"


def weight_bytes(info: ModelInfo, quantize: str | None, width: int, *, on_gpu: bool) -> int | None:
    """Return the bytes of all weights in memory; None without files.

    Quantized files stay as they are, but codes of 2 and 3 bits take 4.

    Args:
        width: Bytes of a plain weight.
    """
    size = info.weight_bytes
    if size is None:
        return None
    if info.quantization is None and quantize not in ON_LOAD:
        return size // info.stored_itemsize * width
    if not info.hidden_size or not info.vocab_size:
        return None if info.quantization is None else size
    plain = info.vocab_size * info.hidden_size * (1 if info.has_tied_head else 2)
    plain = min(plain, size // info.stored_itemsize)
    if info.quantization is not None:
        matrices = size - plain * info.stored_itemsize
        return (
            size
            - matrices
            + int(matrices * _growth(info.quantization, info.hidden_size, decodes=on_gpu and width == 2))
        )
    numbers = size // info.stored_itemsize - plain
    if quantize in FOUR_BITS:
        return plain * width + numbers * _BLOCK_BYTES // _BLOCK
    return plain * width + numbers + _ROW_BYTES * (numbers // info.hidden_size)


def _growth(said: Mapping[str, Any], hidden_size: int, *, decodes: bool) -> float:
    """Return the bytes in memory for each byte of quantized weights in the file."""
    # A group of codes of 2 and 3 bits has a scale of 2 bytes, and a zero point that is a code in the file and a byte in
    # memory. 4-bit floats have a scale of a byte in the file for 32 (MXFP4) or 16 (NVFP4) numbers, which takes 4 in
    # memory, and a zero point of one byte, unless a GPU kernel `decodes` them as they are. The scale of 64 numbers of
    # bitsandbytes takes 4, and a byte in the file if it is quantized itself.
    if said.get("quant_method") == "gguf":  # as was written when the file was prepared
        growth = said.get("growth")
        return growth if isinstance(growth, float) else 1.0
    kinds = f"{said.get('quant_method')} {said.get('format')} {said.get('quant_algo')}".lower()
    if "mxfp4" in kinds:
        return 1.0 if decodes else 21 / 17
    if "nvfp4" in kinds:
        return 1.0 if decodes else 13 / 9
    if said.get("quant_method") == "bitsandbytes" and said.get("bnb_4bit_use_double_quant"):
        return 72 / 66
    bits, group = said.get("bits"), said.get("group_size")
    if bits not in (2, 3):
        return 1.0
    columns = group if isinstance(group, int) and group > 0 else hidden_size
    return float((columns * 4 + 8 + 16) / (columns * bits + bits + 16))


def cache_dtype(config: LauncherConfig, info: ModelInfo, gpu: Gpu | None) -> str | None:
    """Type of the numbers in the KV cache; None: the model's."""
    if info.latent is not None:
        return None
    if config.kv_cache_dtype is not None or gpu is None or config.attention in KEEP_MODEL_TYPE:
        return config.kv_cache_dtype
    is_able = gpu.compute_capability is not None and gpu.compute_capability >= FLOAT8_CAPABILITY
    return "fp8_e4m3fn" if is_able and info.wants_float8_cache else None


def token_bytes(info: ModelInfo, num_shard: int, width: int) -> int | None:
    """Return the bytes of a token in one shard's KV cache: KV heads are divided, latents are whole on every shard."""
    if info.key_layers is not None:
        return sum(2 * max(1, heads // num_shard) * dim for heads, dim in info.key_layers) * width
    if not info.num_layers:
        return None
    layers = info.num_layers - (0 if info.mixers is None else info.mixers.without_keys)
    if not layers:
        return 0
    if info.latent is not None:
        return info.latent.cached(layers) * width
    if not info.num_kv_heads or not info.head_dim:
        return None
    return 2 * layers * max(1, info.num_kv_heads // num_shard) * info.head_dim * width
