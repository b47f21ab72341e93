"""From GGUF names to transformers', and what some rows and numbers need."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.architecture import Architecture
from model_server.weights.gguf.architectures import architecture_of
from model_server.weights.gguf.header import GgufHeader, read_gguf
from model_server.weights.header import Header, Stored
from wire.quantization.gguf import first_link

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config."""

_CONVOLUTIONS = ("shortconv.conv", "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
# One matrix of each head.
_STACKED = ("attn_k_b", "attn_v_b")
_VECTORS = ("ssm_a", "ssm_d", "ssm_norm")
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.([\w.]+?)(?:\.(weight|bias))?")


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
        if module in architecture.outside:
            found[f"{architecture.outside[module]}.{kind}"] = stored
        elif match is None:
            raise _unknown(name, path)
        elif num_layers is None or int(match[1]) < num_layers:  # else of multi-token prediction
            for ours, one in _of_layer(architecture, match, stored, path):
                found[f"{architecture.layers}.{int(match[1])}.{ours}"] = one
    return found


def _of_layer(
    architecture: Architecture, match: re.Match[str], stored: Stored, path: Path
) -> Iterator[tuple[str, Stored]]:
    """Yield a tensor of a layer by the names that it has there."""
    module, kind = match[2], match[3]
    whole = module if kind is None else f"{module}.{kind}"
    if whole in architecture.tensors:
        yield architecture.tensors[whole], _shaped(module, stored)
    elif module in architecture.layer and kind is not None:
        yield f"{architecture.layer[module]}.{kind}", _shaped(module, stored)
    elif module in architecture.experts and kind == "weight":
        for expert, one in enumerate(_experts(match[0], stored, path)):
            yield f"{architecture.experts[module].format(expert)}.weight", one
    else:
        raise _unknown(match[0], path)


def _unknown(name: str, path: Path) -> StartupError:
    return StartupError(f"{path} holds the tensor {name!r:.200}, which is not served in its architecture")


def num_layers_of(metadata: Mapping[str, Any]) -> int | None:
    """Return the number of layers without those of multi-token prediction, if the file says it."""
    name = metadata["general.architecture"]
    count, predicted = metadata.get(f"{name}.block_count"), metadata.get(f"{name}.nextn_predict_layers", 0)
    return count - predicted if type(count) is int and type(predicted) is int else None


def _shaped(module: str, stored: Stored) -> Stored:
    """Return the tensor with the dimensions that transformers gives it."""
    if module == "ffn_gate_inp_shexp":
        return replace(stored, shape=(1, *stored.shape))
    if module in _CONVOLUTIONS and len(stored.shape) > 1:  # not a bias
        return replace(stored, shape=(math.prod(stored.shape[:-1]), 1, stored.shape[-1]))
    if module in _STACKED:
        return replace(stored, shape=(math.prod(stored.shape[:-1]), stored.shape[-1]))
    return replace(stored, shape=(math.prod(stored.shape),)) if module in _VECTORS else stored


def _experts(name: str, stored: Stored, path: Path) -> list[Stored]:
    if len(stored.shape) != 3:
        raise StartupError(f"{path}: {name} has the shape {list(stored.shape)}; experts, rows and columns are expected")
    size = (stored.end - stored.begin) // stored.shape[0]
    starts = (stored.begin + expert * size for expert in range(stored.shape[0]))
    return [Stored(stored.dtype, stored.shape[1:], start, start + size) for start in starts]
