"""From GGUF names to transformers', and what some rows and numbers need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.architectures import architecture_of
from model_server.weights.gguf.header import GgufHeader, read_gguf
from model_server.weights.header import Header, Stored
from wire.quantization.gguf import first_link

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config."""

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)")


def read_named(path: Path) -> Header:
    """Read tensors by transformers' names."""
    header = read_gguf(path)
    return Header(named_tensors(GgufHeader(metadata_of(path), header.tensors), path))


def metadata_of(path: Path) -> Mapping[str, Any]:
    """Return the model's metadata, without its tokenizer; parts of a folder have those of the first one."""
    first = first_link(path)
    return _metadata(first, first.stat().st_mtime_ns)


@lru_cache(maxsize=1)  # a large vocabulary takes a third of a second to go through, and each part asks
def _metadata(path: Path, changed: int) -> Mapping[str, Any]:
    return {key: value for key, value in read_gguf(path).metadata.items() if not key.startswith("tokenizer.")}


def named_tensors(header: GgufHeader, path: Path) -> dict[str, Stored]:
    """Rename tensors: each expert has its own, and factors of rotations are left out."""
    architecture = architecture_of(header.metadata, path)
    num_layers = num_layers_of(header.metadata)
    found: dict[str, Stored] = {}
    for name, stored in header.tensors.items():
        module, _, kind = name.rpartition(".")
        match = _BLOCK.fullmatch(name)
        if name in FACTORS:
            continue
        if module in _OUTSIDE:
            found[f"{_OUTSIDE[module]}.{kind}"] = stored
        elif match is not None and num_layers is not None and int(match[1]) >= num_layers:
            continue  # of multi-token prediction
        elif match is not None and match[2] in architecture.layer:
            found[f"model.layers.{int(match[1])}.{_module(architecture.layer[match[2]], kind)}"] = _shaped(name, stored)
        elif match is not None and match[2] in architecture.experts and kind == "weight":
            for expert, one in enumerate(_experts(name, stored, path)):
                found[f"model.layers.{int(match[1])}.{architecture.experts[match[2]].format(expert)}.weight"] = one
        else:
            raise StartupError(f"{path} holds the tensor {name!r:.200}, which is not served in its architecture")
    return found


def num_layers_of(metadata: Mapping[str, Any]) -> int | None:
    """Return the number of layers without those of multi-token prediction, if the file says it."""
    name = metadata["general.architecture"]
    count, predicted = metadata.get(f"{name}.block_count"), metadata.get(f"{name}.nextn_predict_layers", 0)
    return count - predicted if type(count) is int and type(predicted) is int else None


def _module(module: str, kind: str) -> str:
    return f"{module}_{kind}" if module.endswith("_correction") else f"{module}.{kind}"


def _shaped(name: str, stored: Stored) -> Stored:
    """Return the row that a shared expert's gate is."""
    return replace(stored, shape=(1, *stored.shape)) if ".ffn_gate_inp_shexp." in name else stored


def _experts(name: str, stored: Stored, path: Path) -> list[Stored]:
    if len(stored.shape) != 3:
        raise StartupError(f"{path}: {name} has the shape {list(stored.shape)}; experts, rows and columns are expected")
    size = (stored.end - stored.begin) // stored.shape[0]
    starts = (stored.begin + expert * size for expert in range(stored.shape[0]))
    return [Stored(stored.dtype, stored.shape[1:], start, start + size) for start in starts]
