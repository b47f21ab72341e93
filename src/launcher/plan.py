"""What will be done: the pure step from config, machine and model to a LaunchPlan.

Starts nothing and looks at nothing. Which attention backend runs and how large the KV cache is are the shards' own
decisions; the plan only passes on what the operator said about them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from launcher.config import DEFAULT_MODEL_ID, LauncherConfig, input_limit
from launcher.errors import ArgumentValidation, NotEnoughCUDADevices
from launcher.hardware import Hardware
from launcher.model_info import ModelInfo

DEFAULT_MASTER_PORT = 29500
_BASE_PREFILL = {"qwen2_vl": 10_000, "qwen2_5_vl": 10_000, "gemma3": 8_000}
_DEFAULT_PREFILL = 4096

# Dense fp16 operations a second, by card, as TGI's launcher has them.
_CARD_FLOPS = {
    "nvidia-4090": 82, "nvidia-t4": 65, "nvidia-l4": 121, "nvidia-l40": 181, "nvidia-l40s": 363, "nvidia-a10g": 125,
    "nvidia-a40": 149, "nvidia-a100": 312, "nvidia-a100-sxm4-80gb": 312, "nvidia-a100-sxm4-40gb": 312,
    "nvidia-a100-80gb-pcie": 312, "nvidia-h100": 900, "nvidia-h100-80gb-hbm3": 900, "nvidia-h100-nvl": 900,
    "nvidia-h200": 989,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses that were found free: where this launch listens, inside and outside."""

    hostname: str
    """An IP address."""
    port: int
    uds_prefix: str
    master_port: int


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything the children's command lines are made of. `asked` holds what passes through unchanged."""

    asked: LauncherConfig
    model_id: str
    endpoints: Endpoints
    num_shard: int
    on_gpu: bool
    max_input_tokens: int | None
    max_batch_prefill_tokens: int
    compute_type: str | None
    notes: tuple[str, ...] = ()
    """What the operator should know: each is logged as a warning."""

    def rows(self) -> list[tuple[str, str]]:
        """The plan for people: what was decided, in the order of the work."""
        asked, measured = self.asked, "what fits (measured at warm-up)"
        device = "GPU" if self.on_gpu else "CPU"
        return [
            ("model", self.model_id + (f" @ {asked.revision}" if asked.revision else "")),
            ("shards", f"{self.num_shard} on {device}"),
            ("dtype", asked.dtype or "chosen by the shard"),
            ("attention", asked.attention or "chosen by the shard"),
            ("max input tokens", _shown(self.max_input_tokens, "max total tokens - 1")),
            ("max total tokens", _shown(asked.max_total_tokens, measured)),
            ("max batch prefill tokens", str(self.max_batch_prefill_tokens)),
            ("max batch total tokens", _shown(asked.max_batch_total_tokens, measured)),
            ("max concurrent requests", str(asked.max_concurrent_requests)),
            ("listens on", f"{self.endpoints.hostname}:{self.endpoints.port}"),
            ("sockets", f"{self.endpoints.uds_prefix}-<rank>"),
        ]


def _shown(value: int | None, default: str) -> str:
    return default if value is None else str(value)


def make_plan(config: LauncherConfig, hardware: Hardware, info: ModelInfo | None, endpoints: Endpoints) -> LaunchPlan:
    """Raises ArgumentValidation or NotEnoughCUDADevices if the three do not go together."""
    num_shard, notes = resolve_num_shard(config, hardware, info)
    prefill, more = prefill_tokens(config, hardware, info, num_shard)
    notes = (*notes, *more)
    positions = info.max_position_embeddings if info else None
    if positions and config.max_total_tokens and config.max_total_tokens > positions:
        notes += (
            f"`--max-total-tokens` {config.max_total_tokens} is more than the model's {positions} positions: "
            "longer texts may be nonsense",
        )
    memory = hardware.shared_memory_bytes
    if num_shard > 1 and hardware.gpus and memory is not None and memory < 2**30:
        notes += (f"/dev/shm has {memory >> 20} MiB; shards may need 1 GiB there (docker: --shm-size 1g)",)
    return LaunchPlan(
        asked=config,
        model_id=config.model_id or DEFAULT_MODEL_ID,
        endpoints=endpoints,
        num_shard=num_shard,
        on_gpu=bool(hardware.gpus),
        max_input_tokens=input_limit(config),
        max_batch_prefill_tokens=prefill,
        compute_type=_compute_type(hardware, num_shard),
        notes=notes,
    )


def resolve_num_shard(
    config: LauncherConfig, hardware: Hardware, info: ModelInfo | None
) -> tuple[int, tuple[str, ...]]:
    """The number of shards, and what to warn about. Raises as `make_plan`."""
    asked, available = config.num_shard, len(hardware.gpus)
    heads = info.num_heads if info else None
    if asked is not None:
        if available and asked > available:
            raise ArgumentValidation(
                f"`--num-shard` {asked} is more than the {available} visible GPUs (see CUDA_VISIBLE_DEVICES)"
            )
        if heads and heads % asked:
            raise ArgumentValidation(
                f"`--num-shard` {asked} does not divide the model's {heads} attention heads; "
                f"try {_largest_divisor(heads, asked)}"
            )
        contradicts = config.sharded is False and asked > 1
        return asked, (f"`--sharded false` contradicts `--num-shard` {asked}; {asked} shards",) if contradicts else ()
    if config.sharded is False:
        return 1, ()
    if config.sharded and available <= 1:
        raise NotEnoughCUDADevices(
            f"`--sharded true` but only {available} CUDA devices were found; for shards on a CPU give `--num-shard`"
        )
    if available <= 1:
        return 1, ()
    count = _largest_divisor(heads, available) if heads else available
    if config.sharded and count == 1:
        raise ArgumentValidation(f"`--sharded true` but no count up to {available} divides the model's {heads} heads")
    reduced = f"{available} GPUs are visible; using {count}, which divides the model's {heads} attention heads"
    return count, (reduced,) if count < available else ()


def _largest_divisor(number: int, limit: int) -> int:
    return next(count for count in range(min(number, limit), 0, -1) if number % count == 0)


def prefill_tokens(
    config: LauncherConfig, hardware: Hardware, info: ModelInfo | None, num_shard: int
) -> tuple[int, tuple[str, ...]]:
    """TGI's default of max_batch_prefill_tokens: what the cards compute in about a second, within memory."""
    if config.max_batch_prefill_tokens is not None:
        return config.max_batch_prefill_tokens, ()
    notes: tuple[str, ...] = ()
    gpu = hardware.gpus[0] if hardware.gpus else None
    flops = _CARD_FLOPS.get(gpu.card) if gpu else None
    tokens = _BASE_PREFILL.get(info.model_type or "", _DEFAULT_PREFILL) if info else _DEFAULT_PREFILL
    if info and gpu:
        if flops is None:
            notes += (f"no figures for the card {gpu.card!r}: default prefill budget",)
        per_token = _model_flops(info)
        if flops and per_token and (optimal := flops * 10**12 * num_shard // per_token) > 100:
            tokens = optimal
    if info and info.max_position_embeddings:
        tokens = min(tokens, info.max_position_embeddings)
    if info and gpu and gpu.memory_mib and not info.is_quantized:
        available = _f32(float((gpu.memory_mib << 20) * num_shard))
        available = _f32(_f32(available * _f32(config.cuda_memory_fraction)) * _f32(config.tgi_wiggle_room))
        sizes = _memory_use(info)
        if sizes is not None:
            model_bytes, token_bytes = sizes
            if model_bytes > available:
                notes += ("the model seems to be larger than the memory of the GPUs",)
            elif (cap := max(1, (int(available) - model_bytes) // token_bytes)) < tokens:
                notes += (f"prefill budget lowered from {tokens} to {cap} tokens, which is what fits in memory",)
                tokens = cap
    # Ours: a default must not contradict what the operator set.
    return min(tokens, config.max_batch_total_tokens or tokens), notes


def _model_flops(info: ModelInfo) -> int | None:
    """Operations of one token in the linear layers."""
    hidden, inner, heads = info.hidden_size, info.intermediate_size, info.num_heads
    kv_heads, width, layers = info.num_kv_heads, info.head_dim, info.num_layers
    if info.has_vision or not (hidden and inner and heads and kv_heads and width and layers):
        return None
    attention = 2 * hidden * (3 * heads * width + 2 * kv_heads * width)
    return layers * (attention + 6 * hidden * inner * (info.experts_per_token + info.num_shared_experts))


def _memory_use(info: ModelInfo) -> tuple[int, int] | None:
    """Bytes of the weights, and of one token in a prefill, at two bytes an element."""
    hidden, inner, heads, vocab = info.hidden_size, info.intermediate_size, info.num_heads, info.vocab_size
    kv_heads, width, layers, experts = info.num_kv_heads, info.head_dim, info.num_layers, info.num_experts
    if not (hidden and inner and heads and kv_heads and width and layers and vocab):
        return None
    attention = (heads + 2 * kv_heads) * width + heads * width * hidden
    model = 2 * (layers * (attention + 3 * inner * experts * hidden) + 2 * hidden * vocab)
    return model, 4 * kv_heads * width * layers + 6 * (inner + inner // 2) * experts


def _f32(value: float) -> float:
    """TGI computes the memory cap in single precision; so do we, for equal defaults."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _compute_type(hardware: Hardware, num_shard: int) -> str | None:
    if not hardware.gpus or not hardware.gpus[0].card:
        return None
    card = hardware.gpus[0].card
    if "a100" in card:
        card = "nvidia-a100-sxm4-80gb"
    elif "h100" in card:
        card = "nvidia-h100-80fb-hbm3"  # Misspelt in TGI; clients compare the header with it.
    return f"{num_shard}-{card}"
