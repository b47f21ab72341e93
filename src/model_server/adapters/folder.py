"""The folder of a LoRA adapter: its config and the headers of its tensors, checked against the layers of the model.

Nothing else in the folder is read, and no weights here: `Adapter.open` gives what reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model_server.adapters.config import AdapterConfig, read_config
from model_server.errors import StartupError
from model_server.weights.header import Header, Stored, read_headers
from model_server.weights.locate import stays_inside
from model_server.weights.reader import FLOATING, SafetensorsReader

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_COPY = ".base_layer.weight"
_MOST_NAMED = 8

# (number of inputs, number of outputs) of each layer that takes adapters, by the name of its module.
Targets = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrices of one module, by their names in the files: A [rank, in] and B [out, rank]; scale: on B @ A.

    copy: the base model's own matrix, which PEFT saves beside the adapter of a tied head.
    """

    a: str
    b: str
    rank: int
    scale: float
    copy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A checked adapter. pairs: by the model's name of the module. rank: the largest of all pairs."""

    name: str
    base: str | None
    rank: int
    pairs: Mapping[str, Pair]
    headers: Mapping[Path, Header]

    def open(self) -> SafetensorsReader:
        """What reads its matrices in float32, on the host. Raises StartupError."""
        return SafetensorsReader(self.headers, dtype=torch.float32, device=torch.device("cpu"), base_prefix=_PREFIX)


def read_adapter(name: str, directory: Path, targets: Targets, head: str, base_prefixes: Sequence[str]) -> Adapter:
    """The adapter `name` in `directory`, for a model with these layers.

    head: its module, of which the adapter may bring a copy of the base model's matrix. base_prefixes: modules may
    be named with any of them, of which the first is the model's own, or without, as in the weight files of a model.

    Raises StartupError, one line that begins with the adapter's name, for whatever is missing, damaged or not served: a
    tensor is never skipped.
    """
    try:
        config = read_config(directory)
        headers = read_headers(_files(directory))
        pairs = _pairs(config, _tensors(headers), targets, head, base_prefixes)
    except StartupError as error:
        raise StartupError(f"LoRA adapter `{name}`: {error}") from None
    return Adapter(
        name=name,
        base=config.base,
        rank=max(pair.rank for pair in pairs.values()),
        pairs=pairs,
        headers=headers,
    )


def _files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        if any(directory.glob("*.bin")):
            raise StartupError(
                "adapter_model.bin is pickled; load the adapter with PEFT and save it again, which writes safetensors"
            )
        found = ", ".join(sorted(f.name for f in directory.iterdir())[:_MOST_NAMED])
        raise StartupError(f"no *.safetensors in {directory} (found: {found})")
    for file in files:
        if not stays_inside(directory, file.resolve()):
            raise StartupError(f"{file} is a link to {file.resolve()}, which is outside the folder")
    return files


def _tensors(headers: Mapping[Path, Header]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path, header in headers.items():
        for key, stored in header.tensors.items():
            if key in found:
                raise StartupError(f"tensor {key:.200} is in more than one file, also in {path.name}")
            found[key] = stored
    return found


def _pairs(
    config: AdapterConfig, tensors: Mapping[str, Stored], targets: Targets, head: str, base_prefixes: Sequence[str]
) -> Mapping[str, Pair]:
    """Both matrices of each module. Every tensor must be one of them."""
    by_short_name = {target.removeprefix(base_prefixes[0]): target for target in targets}
    pairs: dict[str, Pair] = {}
    for key in tensors:
        module = key.removeprefix(_PREFIX)
        ending = next((e for e in (_A, _B, _COPY) if module.endswith(e)), "")
        module = module.removesuffix(ending)
        prefix = max(filter(module.startswith, base_prefixes), key=len, default="")
        target = by_short_name.get(module.removeprefix(prefix))
        if not ending or not key.startswith(_PREFIX) or target is None or (ending == _COPY and target != head):
            raise StartupError(f"tensor {key:.200} belongs to no layer that takes adapters")
        rank, stem = config.rank_of(module), _PREFIX + module
        num_inputs, num_outputs = targets[target]
        shapes = {_A: (rank, num_inputs), _B: (num_outputs, rank), _COPY: (num_outputs, num_inputs)}
        _check(key, tensors[key], shapes[ending])
        copy = stem + _COPY if stem + _COPY in tensors else None
        pair = Pair(stem + _A, stem + _B, rank, config.scale_of(module), copy)
        for other in (pair.a, pair.b):
            if other not in tensors:
                raise StartupError(f"tensor {other:.200} is missing beside {key:.200}")
        if pairs.setdefault(target, pair) != pair:
            raise StartupError(f"tensor {key:.200}: another name of the same module has tensors too")
    if not pairs:
        raise StartupError("there are no tensors in it")
    return pairs


def _check(key: str, stored: Stored, shape: tuple[int, int]) -> None:
    if stored.shape != shape:
        raise StartupError(f"tensor {key:.200} has shape {list(stored.shape)}; {list(shape)} is expected")
    if stored.dtype not in FLOATING:
        raise StartupError(f"tensor {key:.200} is stored as {stored.dtype}; floating-point numbers are expected")
