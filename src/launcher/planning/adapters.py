"""What the slots for LoRA adapters take of a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.planning.model_info import ModelInfo, directory, is_local
from launcher.planning.weight_files import shapes_in
from wire.adapters import DEFAULT_RANK, DEFAULT_SLOTS, MAX_NEW_ROWS, RANKS, adapter_sources
from wire.lora.merged import ADAPTER_CONFIG, base_model
from wire.model_files import read_object

_AFFINE_BYTES = 8
"""Of an output that adapters may multiply and shift."""
_A = (".lora_A.weight", ".lora_embedding_A")
_B = (".lora_B.weight", ".lora_embedding_B")
_AFFINE = (".lora_magnitude_vector", ".lora_magnitude_vector.weight", ".lora_B.bias")
_NEW_ROWS = ".token_adapter.trainable_tokens_delta"
_EXPERTS = (".experts", ".experts.base_layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The adapters of `--lora-adapters` together; counts of numbers over all modules that one of them changes."""

    count: int = 0
    # The largest.
    rank: int = 1
    # Of the As (`outputs`: of the Bs) for each of the rank; experts apart.
    inputs: int = 0
    outputs: int = 0
    experts: tuple[int, int] = (0, 0)
    # Outputs that one may multiply and shift.
    affine: int = 0
    # Numbers in new rows of embedding and head.
    rows: int = 0


NO_ADAPTERS = Listed()


def base_id(model_id: str) -> str | None:
    """Return the hub id of the model that a local adapter changes."""
    found = directory(model_id, None, {}) if is_local(model_id) else None
    base = None if found is None else base_model(found, ArgumentValidation, is_local=True)
    return None if base is None or is_local(base.model_id) else base.model_id


def listed_folders(config: LauncherConfig, environ: Mapping[str, str]) -> dict[str, Path | None]:
    """Name → folder of the adapters of `--lora-adapters`; None: it is not on this machine."""
    sources = adapter_sources(config.lora_adapters, ArgumentValidation)
    return {source.name: directory(source.place, source.revision, environ) for source in sources}


def read_listed(folders: Mapping[str, Path | None]) -> Listed:
    """Read the headers of the adapters' files; what cannot be read is counted, and refused by the shards."""
    sizes: dict[str, int] = {}
    rank = 1
    for folder in folders.values():
        if folder is None:
            continue
        said = _rank(folder)
        shapes = {name: shape for file in folder.glob("*.safetensors") for name, shape in shapes_in(file).items()}
        for name, shape in shapes.items():
            own, size = _of_tensor(name, shape, said)
            rank = max(rank, own)
            sizes[name] = max(sizes.get(name, 0), size)

    def total(endings: tuple[str, ...], *, of_experts: bool = False) -> int:
        return sum(
            size for name, size in sizes.items() if name.endswith(endings) and _is_of_experts(name) == of_experts
        )

    return Listed(
        count=len(folders),
        rank=rank,
        inputs=total(_A),
        outputs=total(_B),
        experts=(total(_A, of_experts=True), total(_B, of_experts=True)),
        affine=total(_AFFINE),
        rows=total((_NEW_ROWS,)),
    )


def _rank(folder: Path) -> int:
    try:
        said = read_object(folder / ADAPTER_CONFIG, ValueError).get("r")
    except ValueError:
        return 1
    return said if type(said) is int and said > 0 else 1


def _of_tensor(name: str, shape: Sequence[int], said: int) -> tuple[int, int]:
    """The rank that a tensor shows, and its numbers for each of the rank. said: by the config."""
    numbers = math.prod(shape)
    if not name.endswith((*_A, *_B)) or len(shape) != 2:
        return 1, numbers
    if _is_of_experts(name):
        return said, numbers // said
    rank = shape[0] if name.endswith(_A) else shape[1]
    return rank, numbers // max(1, rank)


def _is_of_experts(name: str) -> bool:
    """Whether it is a tensor of PEFT's for a parameter of all experts."""
    return name.rpartition(".lora_")[0].endswith(_EXPERTS)


def slot_bytes(
    config: LauncherConfig, info: ModelInfo, num_shard: int, width: int, listed: Listed = NO_ADAPTERS
) -> int:
    """Return the bytes of slots on each GPU, `width` bytes a number.

    Args:
        listed: Decides the layers; with `--lora-root` all except experts are counted.
    """
    least = DEFAULT_RANK if config.lora_root is not None else 1
    rank = config.lora_max_rank or next((size for size in RANKS if size >= max(least, listed.rank)), RANKS[-1])
    # Of a matrix that is divided by rows, B is, of one by columns A.
    shared = (1 + 1 / num_shard) / 2
    experts = int(sum(listed.experts) * shared) * rank * width
    if config.lora_root is not None:
        return (config.lora_slots or DEFAULT_SLOTS) * (
            _of_all_layers(info.text or info, num_shard, rank, width) + experts
        )
    each = int((listed.inputs + listed.outputs) * shared) * rank * width + experts
    each += listed.affine * _AFFINE_BYTES + listed.rows * width
    return min(config.lora_slots or DEFAULT_SLOTS, listed.count) * each


def _of_all_layers(info: ModelInfo, num_shard: int, rank: int, width: int) -> int:
    hidden, inner, vocab, layers = info.hidden_size, info.intermediate_size, info.vocab_size, info.num_layers
    if not (hidden and inner and vocab and layers):
        return 0
    attention = _of_attention(info, num_shard, hidden)
    if attention is None:
        return 0
    others = 0 if info.mixers is None else info.mixers.without_keys
    inputs, outputs = ((layers - others) * numbers for numbers in attention)
    channels = hidden // num_shard  # of the two matrices around a short convolution
    inputs, outputs = inputs + others * (hidden + channels), outputs + others * (3 * channels + hidden)
    num_dense = min(info.num_dense, layers) if info.num_routed else layers
    for count, size in ((num_dense, inner // num_shard), (layers - num_dense, info.shared_size // num_shard)):
        if size:
            inputs, outputs = inputs + count * (2 * hidden + size), outputs + count * (2 * size + hidden)
    # Of the router, and of the gate of shared experts.
    for count in (info.num_routed, int(info.has_shared_gate)):
        inputs += (layers - num_dense) * hidden * bool(count)
        outputs += (layers - num_dense) * count
    head = vocab // num_shard
    numbers = rank * (inputs + outputs + hidden + head + vocab + hidden) + 2 * MAX_NEW_ROWS * hidden
    return numbers * width + (outputs + head) * _AFFINE_BYTES


def _of_attention(info: ModelInfo, num_shard: int, hidden: int) -> tuple[int, int] | None:
    """Return inputs of the As and outputs of the Bs of one layer on a rank, if config.json says it."""
    heads, kv_heads, dim, latent = info.num_heads, info.num_kv_heads, info.head_dim, info.latent
    if not heads:
        return None
    if latent is None:
        if not (kv_heads and dim):
            return None
        attended = heads * dim // num_shard
        return 3 * hidden + attended, attended + 2 * max(1, kv_heads // num_shard) * dim + hidden
    heads //= num_shard
    query = heads * (latent.plain + latent.rotated)
    attended = heads * latent.value
    # Of the latent and the rotated key, of keys and values, of the output; then of the query, maybe by way of a latent.
    inputs = hidden + latent.keys + attended + hidden
    outputs = latent.keys + latent.rotated + heads * (latent.plain + latent.value) + hidden + query
    if latent.queries:
        inputs, outputs = inputs + latent.queries, outputs + latent.queries
    if latent.indexers and latent.indexers == info.num_layers:  # whole on every rank
        inputs += latent.queries + 2 * hidden
        outputs += latent.index_heads * latent.index_dim + latent.index_dim + latent.index_heads
    return inputs, outputs
