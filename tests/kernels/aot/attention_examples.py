"""Layers of real models that the attention kernels are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from aot.variant import Variant
from model_server.attention.backend import Alibi, AttentionLayer
from model_server.kernels.attention.parts import SHARED_MEMORY, Tiles


@dataclass(frozen=True, slots=True)
class Example:
    """A real model's layer; types in Triton's words."""

    name: str
    layer: AttentionLayer
    query_type: str = "bf16"
    cache_type: str = "bf16"
    value_in_key: bool = False

    @property
    def cache_itemsize(self) -> int:
        return {"fp32": 4, "bf16": 2, "fp16": 2}.get(self.cache_type, 1)


def examples() -> list[Example]:
    """List heads of Llama, Stable LM, Phi 3, Gemma 2, GPT-OSS, Falcon and DeepSeek."""

    def heads(num_heads: int, num_kv_heads: int, dim: int, value_dim: int | None = None, **more: Any) -> AttentionLayer:
        return AttentionLayer(
            index=0,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            value_dim=dim if value_dim is None else value_dim,
            scale=dim**-0.5,
            **more,
        )

    numbers = torch.zeros(64)
    llama = heads(32, 8, 128)
    return [
        Example("64", heads(32, 8, 64)),
        Example("80, no groups", heads(32, 32, 80)),
        Example("96, no groups, window", heads(32, 32, 96, window=2047)),
        Example("128", llama),
        Example("128, fp16", llama, "fp16", "fp16"),
        Example("128, fp32", llama, "fp32", "fp32"),
        Example("128, fp8 cache", llama, "bf16", "fp8e4nv"),
        Example("128, groups of 8, chunk", heads(40, 5, 128, chunk=8192)),
        Example("256, softcap", heads(16, 8, 256, softcap=50.0)),
        Example("64, groups of 8, sinks", heads(64, 8, 64, sinks=numbers, window=128)),
        Example("64, groups of 71, alibi", heads(71, 1, 64, alibi=Alibi(numbers, 0.125))),
        Example("latent, 16 heads", heads(16, 1, 576, 512), value_in_key=True),
        Example("latent, expanded", heads(16, 16, 192, 128)),
        Example("latent, 128 heads", heads(128, 1, 576, 512), value_in_key=True),
    ]


def example_variants(
    kernel: Any,
    types: Mapping[str, str],
    strides: tuple[str, ...],
    constants: Callable[[Example, int], Sequence[tuple[Mapping[str, Any], Tiles]]],
) -> list[Variant]:
    """List an attention kernel's variants, several where shared memory differs.

    Args:
        types: Of arguments that are the same in all.
        strides: Multiples of 16.
        constants: What an example may run with within so many bytes of shared memory.
    """
    found = []
    for example in examples():
        configs = {
            target: constants(example, SHARED_MEMORY[divmod(target, 10)])
            for target in (80, 90, 100)
            # There is no e4m3 before 8.9.
            if target > 80 or example.cache_type != "fp8e4nv"
        }
        possible = list(chain.from_iterable(configs.values()))
        distinct = [config for i, config in enumerate(possible) if config not in possible[:i]]
        query, cache = "*" + example.query_type, "*" + example.cache_type
        signature = {**types, **dict.fromkeys(("query", "output"), query), **dict.fromkeys(("keys", "values"), cache)}
        optional: dict[str, Any] = {}
        for name, tensor in (("slopes", example.layer.alibi), ("sinks", example.layer.sinks)):
            if tensor is None:
                optional[name] = None
            else:
                signature[name] = "*fp32"
        for config in distinct:
            values, tiles = config
            given = {name: kind for name, kind in signature.items() if name not in values}
            pointers = tuple(name for name, kind in given.items() if kind.startswith("*"))
            found.append(
                Variant(
                    name=example.name,
                    kernel=kernel,
                    signature=given,
                    constants={**values, **optional},
                    divisible=pointers + strides,
                    num_warps=tiles.num_warps,
                    num_stages=tiles.num_stages,
                    excluded=frozenset(t for t in (80, 90, 100) if config not in configs.get(t, ())),
                )
            )
    return found
