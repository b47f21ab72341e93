"""What the slots for LoRA adapters take of a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.planning.model_info import ModelInfo, directory, shapes_in
from wire.adapters import DEFAULT_RANK, DEFAULT_SLOTS, MAX_NEW_ROWS, RANKS, adapter_sources
from wire.lora.merged import ADAPTER_CONFIG
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
    """The adapters of `--lora-adapters` together. rank: the largest. inputs, outputs: numbers of the As and of the Bs
    of all modules that one of them changes, for each of the rank; of experts apart. affine: outputs that one may
    multiply and shift. rows: numbers in new rows of embedding and head."""

    count: int = 0
    rank: int = 1
    inputs: int = 0
    outputs: int = 0
    experts: tuple[int, int] = (0, 0)
    affine: int = 0
    rows: int = 0


NO_ADAPTERS = Listed()


def read_listed(config: LauncherConfig, environ: Mapping[str, str]) -> Listed:
    """By the headers of their files. What is not there, or cannot be read, counts nothing: the shards refuse it."""
    sizes: dict[str, int] = {}
    rank = 1
    sources = adapter_sources(config.lora_adapters, ArgumentValidation)
    for source in sources:
        folder = directory(source.place, source.revision, environ)
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
        count=len(sources),
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
    """Bytes on each of `num_shard` GPUs, each number of `width` bytes: for the layers that `listed` changes, with
    `--lora-root` for all except experts, 0 of a model whose layers config.json does not say."""
    least = DEFAULT_RANK if config.lora_root is not None else 1
    rank = config.lora_max_rank or next((size for size in RANKS if size >= max(least, listed.rank)), RANKS[-1])
    # Of a matrix that is divided by rows, B is, of one by columns A.
    shared = (1 + 1 / num_shard) / 2
    experts = int(sum(listed.experts) * shared) * rank * width
    if config.lora_root is not None:
        return (config.lora_slots or DEFAULT_SLOTS) * (_of_all_layers(info, num_shard, rank, width) + experts)
    each = int((listed.inputs + listed.outputs) * shared) * rank * width + experts
    each += listed.affine * _AFFINE_BYTES + listed.rows * width
    return min(config.lora_slots or DEFAULT_SLOTS, listed.count) * each


def _of_all_layers(info: ModelInfo, num_shard: int, rank: int, width: int) -> int:
    hidden, inner, vocab, layers = info.hidden_size, info.intermediate_size, info.vocab_size, info.num_layers
    heads, kv_heads, dim = info.num_heads, info.num_kv_heads, info.head_dim
    if info.latent_size is not None or not (hidden and inner and vocab and layers and heads and kv_heads and dim):
        return 0
    attended, inner = heads * dim // num_shard, inner // num_shard
    outputs = attended + 2 * max(1, kv_heads // num_shard) * dim + hidden
    inputs = 3 * hidden + attended
    if info.num_routed:
        outputs, inputs = outputs + info.num_routed, inputs + hidden  # of the router
    else:
        outputs, inputs = outputs + 2 * inner + hidden, inputs + 2 * hidden + inner
    head = vocab // num_shard
    matrices = layers * (inputs + outputs) + hidden + head + vocab + hidden
    numbers = rank * matrices + 2 * MAX_NEW_ROWS * hidden
    return numbers * width + (layers * outputs + head) * _AFFINE_BYTES
