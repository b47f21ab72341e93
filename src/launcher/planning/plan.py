"""Pure step from config, machine and model to a LaunchPlan; attention backend and KV cache size are the shards'
decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from launcher.command import unix_url, url_of
from launcher.config import DEFAULT_MODEL_ID, LauncherConfig, input_limit
from launcher.errors import ArgumentValidation, NotEnoughCUDADevices
from launcher.planning.adapters import NO_ADAPTERS, Listed
from launcher.planning.hardware import Hardware
from launcher.planning.memory import Estimate, estimate, task_of
from launcher.planning.model_info import ModelInfo, shown_bytes
from launcher.planning.prefill import Resolved, prefill_tokens
from wire.host import kv_memory
from wire.pooling.task import Task
from wire.quantization.methods import choose
from wire.text.counting import counted

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses that were found free: where this launch listens, inside and outside."""

    hostname: str
    """An IP address."""
    port: int
    uds_prefix: str
    master_port: int
    uds: Path | None = None
    """Where HTTP is served instead of the port."""
    front_uds: Path | None = None
    """Where the front holds API keys to their limits, if this is one of several models."""


@dataclass(frozen=True, kw_only=True)
class NodePart:
    """What this node does in a group of nodes, each of which has as many shards."""

    node_rank: int
    num_nodes: int
    store_address: str
    """Where rank 0 listens for the other ranks, at `Endpoints.master_port`."""
    key_prefix: str
    """Of the keys by which the ranks find each other."""
    interface: str | None
    """Network interface of the ranks' connections; None: what the libraries choose."""
    endpoints: tuple[str, ...]
    """Of all nodes in their order: where the first shard of each answers the router."""


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
    hardware: Hardware
    info: ModelInfo | None
    task: Task
    memory: Estimate
    part: NodePart | None = None
    """None: one node serves alone."""
    reasons: tuple[str, ...] = ()
    """One record for each value that was not asked for: what it is, and the rule that gave it."""
    notes: tuple[str, ...] = ()
    """What the operator should know: each is logged as a warning."""

    @property
    def ranks(self) -> range:
        """The shards of this node."""
        if self.part is None:
            return range(self.num_shard)
        per_node = self.num_shard // self.part.num_nodes
        return range(self.part.node_rank * per_node, (self.part.node_rank + 1) * per_node)

    @property
    def url(self) -> str:
        """Return the server's URL for a client on this machine."""
        ends = self.endpoints
        if ends.uds is not None:
            return unix_url(ends.uds)
        return url_of(ends.hostname, ends.port, has_tls=self.asked.ssl_certfile is not None)


def make_plan(
    config: LauncherConfig,
    hardware: Hardware,
    info: ModelInfo | None,
    endpoints: Endpoints,
    part: NodePart | None = None,
    listed: Listed = NO_ADAPTERS,
) -> LaunchPlan:
    """Plan a launch on the hardware of all nodes.

    Raises:
        ArgumentValidation, NotEnoughCUDADevices: Config, machine and model do not fit together.
    """
    shards = resolve_num_shard(config, hardware, info)
    task = task_of(config, info)
    prefill = prefill_tokens(config, hardware, info, shards.value, listed)
    reasons = [f"Number of shards: {shards.value} ({shards.reason})"]
    if config.max_batch_prefill_tokens is None:
        reasons.append(f"Default `max_batch_prefill_tokens` to {prefill.value} ({prefill.reason})")
    longest = max(config.max_total_tokens or 0, prefill.value)
    memory = estimate(config, hardware, info, shards.value, listed, longest=longest)
    if memory.requests is not None and config.state_slots is None:
        config = replace(config, state_slots=memory.requests)
        size = shown_bytes(memory.state * memory.requests)
        reasons.append(f"Default `state_slots` to {memory.requests} (so many states take {size})")
    _check_cache(config, memory, on_gpu=bool(hardware.gpus))
    if memory.cache is not None and config.kv_cache_memory is None and config.max_batch_total_tokens is None:
        reasons.append(_cache_reason(memory, hardware, shards.value))
    return LaunchPlan(
        asked=config,
        model_id=config.model_id or DEFAULT_MODEL_ID,
        endpoints=endpoints,
        num_shard=shards.value,
        on_gpu=bool(hardware.gpus),
        max_input_tokens=input_limit(config),
        max_batch_prefill_tokens=prefill.value,
        compute_type=_compute_type(hardware, shards.value),
        hardware=hardware,
        info=info,
        task=task,
        memory=memory,
        part=part,
        reasons=tuple(reasons),
        notes=(
            *shards.notes,
            *prefill.notes,
            *_notes(config, hardware, info, shards.value),
            *(_unused(config, task) if task != "generate" else ()),
            *_cache_notes(memory, hardware, shards.value),
        ),
    )


def _check_cache(config: LauncherConfig, memory: Estimate, *, on_gpu: bool) -> None:
    """Refuses a KV cache that holds no request. Raises ArgumentValidation."""
    if on_gpu or config.kv_cache_memory is None or memory.tokens is None:
        return
    # One block is reserved.
    room, wanted = memory.tokens - kv_memory.BLOCK, config.max_total_tokens or 2
    if room < wanted:
        asked = "no request" if config.max_total_tokens is None else f"no request of `--max-total-tokens` {wanted}"
        raise ArgumentValidation(
            f"`--kv-cache-memory` {shown_bytes(config.kv_cache_memory)} holds {memory.tokens} tokens, and {asked}; a "
            f"token takes {shown_bytes(memory.token or 0)}, on each shard"
        )


def _cache_reason(memory: Estimate, hardware: Hardware, num_shard: int) -> str:
    size, why = (memory.cache or 0) * num_shard, "the least" if memory.tokens == kv_memory.LEAST_TOKENS else "the most"
    free = shown_bytes(max(0, (hardware.free_bytes or 0) - (memory.weights or 0)))
    tokens = ""
    if memory.tokens is not None:
        size, tokens = memory.tokens * (memory.token or 0) * num_shard, f"{memory.tokens} tokens, "
    if memory.tokens not in (kv_memory.LEAST_TOKENS, kv_memory.MOST_TOKENS):
        why = f"{kv_memory.SHARE:.0%} of the {free} that are free beside the weights"
    return f"Default `kv_cache_memory` to {tokens}{shown_bytes(size)} ({why}; it is taken as it is first used)"


def _cache_notes(memory: Estimate, hardware: Hardware, num_shard: int) -> list[str]:
    """Warn if the full KV cache of a CPU takes more memory than there is."""
    if hardware.gpus or memory.tokens is None or memory.token is None or hardware.free_bytes is None:
        return []
    full = memory.tokens * memory.token * num_shard
    free = hardware.free_bytes - (memory.weights or 0)
    if full <= free:
        return []
    return [
        f"the KV cache takes {shown_bytes(full)} once it is full, but {shown_bytes(max(0, free))} are free beside the "
        "weights: lower `--kv-cache-memory` or `--max-batch-total-tokens`, or use a smaller model"
    ]


def _unused(config: LauncherConfig, task: Task) -> list[str]:
    """Say which limits mean nothing to a model that generates no text; several models may share their options."""
    names = ("kv_cache_memory", "max_total_tokens", "max_batch_total_tokens", "state_slots")
    given = [f"`--{name.replace('_', '-')}`" for name in names if getattr(config, name) is not None]
    return [f"{', '.join(given)}: without effect, as the model's task is {task}"] if given else []


def _notes(config: LauncherConfig, hardware: Hardware, info: ModelInfo | None, num_shard: int) -> list[str]:
    """What goes together but may not be meant so."""
    notes = []
    positions = info.max_position_embeddings if info else None
    if positions and config.max_total_tokens and config.max_total_tokens > positions:
        notes.append(
            f"`--max-total-tokens` {config.max_total_tokens} is more than the model's {positions} positions: "
            "longer texts may be nonsense"
        )
    memory = hardware.shared_memory_bytes
    if num_shard > 1 and hardware.gpus and memory is not None and memory < 2**30:
        notes.append(f"/dev/shm has {memory >> 20} MiB; shards may need 1 GiB there (docker: --shm-size 1g)")
    if config.num_replica > 1 and not hardware.gpus:
        notes.append("replicas on one CPU share its cores: they serve no more than one does, but one may fail")
    if num_shard > 1 and not hardware.gpus:
        threads = hardware.omp_num_threads
        if num_shard > hardware.cores:
            notes.append(f"{num_shard} shards on {hardware.cores} CPU cores will wait for each other")
        elif threads is not None and threads * num_shard > hardware.cores:
            notes.append(
                f"OMP_NUM_THREADS={threads} makes {num_shard} shards use {threads * num_shard} threads on "
                f"{hardware.cores} CPU cores; without it each shard uses {max(1, hardware.cores // num_shard)}"
            )
    if hardware.unused_gpus:
        notes.append(
            f"{counted(hardware.unused_gpus, 'GPU')} visible, but the installed torch is built for CPUs only: "
            "serving on the CPU; install a torch for CUDA"
        )
    return notes


def check_model(model_id: str, info: ModelInfo | None, quantize: str | None = None) -> None:
    """Refuses what no shard could serve, before one is started. quantize: the flag. Raises ArgumentValidation."""
    if info is not None:
        choose(quantize, info.quantization, model_id, ArgumentValidation)


def resolve_num_shard(config: LauncherConfig, hardware: Hardware, info: ModelInfo | None) -> Resolved:
    """The number of shards of all stages together. Raises as `make_plan`."""
    stages, available = config.num_stage, len(hardware.gpus) // config.num_replica
    if hardware.gpus and not available:
        raise ArgumentValidation(
            f"`--num-replica` {config.num_replica} is too many: {counted(len(hardware.gpus), 'GPU')} visible (see "
            "CUDA_VISIBLE_DEVICES)"
        )
    if config.stage_layers and len(config.stage_layers) != stages:
        raise ArgumentValidation(f"`--stage-layers` names {len(config.stage_layers)} stages, `--num-stage` is {stages}")
    if stages == 1:
        return _of_a_stage(config, available, info)
    if info is not None and info.num_layers is not None and stages > info.num_layers:
        raise ArgumentValidation(f"`--num-stage` {stages}: the model has only {counted(info.num_layers, 'layer')}")
    if 0 < available < stages:
        raise ArgumentValidation(
            f"`--num-stage` {stages} is too many: {counted(available, 'GPU')} visible (see CUDA_VISIBLE_DEVICES)"
        )
    each = _of_a_stage(config, available // stages, info)
    return Resolved(each.value * stages, f"`--num-stage` {stages}, of each stage: {each.reason}", each.notes)


def _of_a_stage(config: LauncherConfig, available: int, info: ModelInfo | None) -> Resolved:
    """The number of shards of one stage, for which `available` GPUs are there."""
    asked = config.num_shard
    if asked is not None:
        return _asked_num_shard(asked, config.sharded, available, info)
    if config.sharded is False:
        return Resolved(1, "`--sharded false`")
    if config.sharded and available <= 1:
        raise NotEnoughCUDADevices(
            f"`--sharded true` but only {available} CUDA devices were found; for shards on a CPU give `--num-shard`"
        )
    if available <= 1:
        return Resolved(1, "one visible GPU" if available else "no visible GPU")
    count = _largest_fitting(info, available)
    heads = _heads(info)
    if config.sharded and count == 1:
        raise ArgumentValidation(f"`--sharded true` but no count up to {available} divides the model's {heads}")
    if count == available:
        return Resolved(count, "all visible GPUs")
    note = f"{available} GPUs are visible; using {count}, the most that divide the model's {heads}"
    return Resolved(count, "the most GPUs that divide the model's heads", (note,))


def _asked_num_shard(asked: int, sharded: bool | None, available: int, info: ModelInfo | None) -> Resolved:
    if available and asked > available:
        raise ArgumentValidation(
            f"`--num-shard` {asked} is too many: {counted(available, 'GPU')} visible (see CUDA_VISIBLE_DEVICES)"
        )
    if not fits(info, asked):
        raise ArgumentValidation(f"`--num-shard` {undivided(asked, info, available)}")
    contradicts = sharded is False and asked > 1
    notes = (f"`--sharded false` contradicts `--num-shard` {asked}; using {asked} shards",) if contradicts else ()
    return Resolved(asked, "`--num-shard`", notes)


def fits(info: ModelInfo | None, count: int) -> bool:
    """Whether `count` shards divide the query heads, and divide or repeat the KV heads."""
    if info is None or not info.num_heads:
        return True
    kv_heads = info.num_kv_heads or info.num_heads
    return info.num_heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)


def undivided(asked: int, info: ModelInfo | None, available: int = 0) -> str:
    """That so many shards cannot serve it, and how many can. available: GPUs; 0: shards are on CPUs."""
    most = available or (info.num_heads if info is not None and info.num_heads else asked)
    fitting = [str(count) for count in range(1, most + 1) if fits(info, count)]
    numbers = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
    return f"{asked} does not divide the model's {_heads(info)}; use {numbers}"


def _largest_fitting(info: ModelInfo | None, limit: int) -> int:
    return next(count for count in range(limit, 0, -1) if fits(info, count))


def _heads(info: ModelInfo | None) -> str:
    if info is None:
        return "attention heads"
    many_kinds = info.num_kv_heads and info.num_kv_heads != info.num_heads
    return f"{info.num_heads} attention heads" + (f" and {info.num_kv_heads} KV heads" if many_kinds else "")


def _compute_type(hardware: Hardware, num_shard: int) -> str | None:
    if not hardware.gpus or not hardware.gpus[0].card:
        return None
    card = hardware.gpus[0].card
    if "a100" in card:
        card = "nvidia-a100-sxm4-80gb"
    elif "h100" in card:
        card = "nvidia-h100-80fb-hbm3"  # Misspelt in TGI; clients compare the header with it.
    return f"{num_shard}-{card}"
