"""`launcher estimate` from its options to the table."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from launcher.errors import ArgumentValidation, LauncherError
from launcher.estimate.config import EstimateConfig
from launcher.estimate.gguf_file import prepared
from launcher.estimate.table import NEW_GPU, Row, rows
from launcher.planning import hardware, hub, model_info, weight_files
from launcher.planning.hardware import Hardware
from launcher.planning.model_info import ModelInfo, shown_bytes
from launcher.planning.plan import check_model, undivided
from wire.cli.commands import with_variables
from wire.host import kv_memory
from wire.text.escape import as_error

_TEXTS = ("weights", "KV cache")
_NUMBERS = ("weights\nper shard", "cache\nper token", "tokens")


def run_estimate(config: EstimateConfig, environ: Mapping[str, str]) -> int:
    """Prints; returns the exit status: 1 for a model that cannot be served or found."""
    try:
        config = dataclasses.replace(config, model_id=prepared(config.model_id, config.revision, environ))
        info = _info(config, environ)
        check_model(config.model_id, info)
        machine = hardware.detect(environ)
        on_gpu = _on_gpu(config, machine)
        available = config.memory if config.memory is not None else _memory(machine, on_gpu=on_gpu)
        found = rows(
            info, machine, config.num_shard, capability=_capability(config, machine) if on_gpu else None,
            available=available, kv_cache_memory=config.kv_cache_memory,
        )  # fmt: skip
        if not found:
            raise ArgumentValidation(f"--num-shard {undivided(config.num_shard or 1, info)}")
    except LauncherError as error:
        sys.stderr.write(as_error(with_variables(str(error), config)) + "\n")
        return 1
    if config.json:
        _print_json(config, info, found, available, on_gpu=on_gpu)
    else:
        _print_table(config, info, found, available, on_gpu=on_gpu)
    return 0


def _info(config: EstimateConfig, environ: Mapping[str, str]) -> ModelInfo:
    """From the directory or the hub cache if all weights are there, else from the hub."""
    directory = model_info.model_directory(config.model_id, config.revision, environ)
    if model_info.is_local(config.model_id) and directory is not None:
        model_info.check_directory(config.model_id, directory)
    if directory is not None:
        info = model_info.read(directory)
        is_local = model_info.is_local(config.model_id)
        if info is not None and info.weight_bytes is not None and (is_local or weight_files.has_all_weights(directory)):
            return info
        if is_local:
            raise ArgumentValidation(f"{directory / 'config.json'} cannot be read")
    if model_info.is_misspelt_demo(config.model_id):
        raise ArgumentValidation(f"{config.model_id}: no such directory; did you mean {model_info.DEMO}?")
    hub.endpoint(environ)  # before the hub library is imported, which fails on one that is not a URL
    from launcher.estimate.remote import fetch

    return fetch(config.model_id, config.revision)


def _on_gpu(config: EstimateConfig, machine: Hardware) -> bool:
    if config.device is not None:
        return config.device == "gpu"
    return bool(machine.gpus) or config.memory is not None


def _capability(config: EstimateConfig, machine: Hardware) -> tuple[int, int]:
    """Return the capability of this machine's oldest GPU, or a new one's if the GPUs are elsewhere."""
    known = [gpu.compute_capability for gpu in machine.gpus if gpu.compute_capability is not None]
    return min(known) if known and config.memory is None else NEW_GPU


def _memory(machine: Hardware, *, on_gpu: bool) -> int | None:
    """Return the bytes of each GPU, or the machine's free bytes.

    Raises:
        ArgumentValidation: GPUs are asked for, and there are none.
    """
    if not on_gpu:
        return machine.free_bytes
    if not machine.gpus:
        raise ArgumentValidation("this machine has no GPU that torch can use; give --memory, such as --memory 80GiB")
    sizes = [gpu.memory_mib for gpu in machine.gpus]
    return min(size << 20 for size in sizes if size is not None) if all(sizes) else None


def _print_json(
    config: EstimateConfig, info: ModelInfo, found: Sequence[Row], available: int | None, *, on_gpu: bool
) -> None:
    answer: dict[str, Any] = {
        "model": config.model_id,
        "summary": info.summary(),
        "device": "gpu" if on_gpu else "cpu",
        "memory": available,
        "request_tokens": config.request,
        "ways": [{**dataclasses.asdict(row), "requests": row.requests(config.request)} for row in found],
    }
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")


def _print_table(
    config: EstimateConfig, info: ModelInfo, found: Sequence[Row], available: int | None, *, on_gpu: bool
) -> None:
    console = Console()
    size = "unknown memory" if available is None else shown_bytes(available)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, collapse_padding=True)
    for name in ("shards", *_TEXTS, *_NUMBERS, f"requests\nof {config.request}"):
        # On a narrow terminal the texts get more lines; no number is cut.
        shown = name if console.is_terminal else name.replace("\n", " ")
        is_text = name in _TEXTS
        table.add_column(shown, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in found:
        table.add_row(*_cells(row, config.request))
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a pipe has no width: no cell is cut
    console.print(f"{config.model_id}: {info.summary()}", markup=False, highlight=False, soft_wrap=True)
    where = f"GPUs with {size} each" if on_gpu else f"a CPU with {size} free"
    note = "Activations also take a part of it."
    if not on_gpu and config.kv_cache_memory is None:
        note += (
            f" The cache has {kv_memory.SHARE:.0%} of what the weights leave, at least {kv_memory.LEAST_TOKENS} tokens "
            "and at most 2^20, unless --kv-cache-memory says how much."
        )
    console.print(f"An estimate for {where}. {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for line in _options(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _options(found: Sequence[Row]) -> list[str]:
    """How to ask the launcher for what is smaller than the checkpoint's own."""
    quantize = dict.fromkeys(f"Weights of {row.weights}: --quantize {row.quantize}" for row in found if row.quantize)
    cache = dict.fromkeys(
        f"KV cache of {row.cache}: --kv-cache-dtype {row.kv_cache_dtype}" for row in found if row.kv_cache_dtype
    )
    return [*quantize, *cache]


def _cells(row: Row, length: int) -> list[str]:
    requests = row.requests(length)
    tokens = "unknown" if row.tokens is None else "does not fit" if row.tokens == 0 else str(row.tokens)
    return [
        str(row.num_shard),
        row.weights,
        row.cache,
        "unknown" if row.weight_bytes is None else shown_bytes(row.weight_bytes),
        "unknown" if row.token_bytes is None else shown_bytes(row.token_bytes),
        tokens,
        "" if not requests else str(requests),
    ]
