"""A whole stack of blocks of Llama's kind, with every one of its options."""

from __future__ import annotations

import ctypes

import numpy as np
from operator_adapters import Adapters
from operator_attention import Layer, Paging, attention, filled_cache, random_batch, random_layer, rotated
from operator_codes import Codes, Float8
from support.cpp_operators import AS, BF16, Operators, address, assert_near, exact, widen

from model_server.cpp.structs import (
    AdapterFactorsStruct,
    StackConfigStruct,
    StackLayerStruct,
    StackMatrixStruct,
    StackStepStruct,
)

EPS, QK_EPS = 1e-5, 1e-6


class Block:
    """The weights of one block, and what keeps the memory of its packed ones."""

    def __init__(
        self,
        operators: Operators,
        random: np.random.Generator,
        type: int,
        layer: Layer,
        sizes: tuple[int, int],
        is_plain: bool,
    ) -> None:
        hidden, inner = sizes
        self.layer = layer
        width, kept_width = layer.heads * layer.key_dim, layer.heads * layer.value_dim
        shapes = {
            "qkv": (width + layer.row_width, hidden),
            "output": (hidden, kept_width),
            "up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        self.weights = {n: AS[type](random.standard_normal(s) / np.sqrt(s[1])) for n, s in shapes.items()}
        stored = {} if is_plain else shapes
        self.codes = {n: Codes.random(random, *size) for n, size in stored.items() if random.random() < 0.3}
        self.floats = {n: Float8.random(random, *s) for n, s in stored.items() if random.random() < 0.2}
        self.panels = {n: operators.packed(type, w) for n, w in self.weights.items() if n not in self.codes}
        self.biases = {
            name: exact(AS[type](random.standard_normal(size[0]) * 0.1), True) if random.random() < 0.3 else None
            for name, size in shapes.items()
        }
        self.shapes = {name: codes.pack(operators, self.biases[name]) for name, codes in self.codes.items()}
        self.shapes |= {name: form.pack(operators, type, self.biases[name]) for name, form in self.floats.items()}
        self.norms = [exact(random.standard_normal(hidden).astype(np.float32), True) for _ in range(2)]
        self.qk_norm = None
        if random.random() < 0.3:
            self.qk_norm = exact(
                random.standard_normal((layer.heads + layer.kv_heads, layer.key_dim)).astype(np.float32)
            )
        self.rope = int(random.integers(-1, 2))
        self.adapters = {
            name: Adapters(operators, random, type, *size) for name, size in shapes.items() if random.random() < 0.6
        }
        self.numbers: np.ndarray | None = None  # of the adapter of each row, where rows have one

    def struct(self, rotary: int) -> StackLayerStruct:
        struct = StackLayerStruct(
            address(self.norms[0]),
            address(self.norms[1]),
            qk_norm=address(self.qk_norm),
            rope=self.rope,
            rotary=rotary,
            attention=self.layer.struct(),
        )
        for name, panels in self.panels.items():
            setattr(struct, name, StackMatrixStruct(address(panels), address(self.biases[name])))
        for name, shape in self.shapes.items():
            setattr(struct, name, StackMatrixStruct(codes=ctypes.pointer(shape)))
        for name, adapters in self.adapters.items():
            getattr(struct, name).adapters = ctypes.cast(adapters.structs, ctypes.POINTER(AdapterFactorsStruct))
        return struct

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.biases[name]
        stored = self.floats.get(name) or self.codes.get(name)
        weight = widen(self.weights[name]) if stored is None else stored.decoded()
        out: np.ndarray = x @ weight.T + (0 if bias is None else widen(bias))
        if self.numbers is not None and name in self.adapters:
            out = self.adapters[name].applied(self.numbers, x, out)
        return out

    def run(self, x: np.ndarray, paging: Paging, cache: np.ndarray, rotations: list[np.ndarray]) -> np.ndarray:
        """x [tokens, hidden] -> the same, in float64; `cache` gets the keys and values."""
        layer = self.layer
        turns = None if self.rope < 0 else rotations[self.rope]
        qkv = self.linear("qkv", normed(x, self.norms[0]))
        qkv = rotated(qkv, layer.heads + layer.kv_heads, layer.key_dim, turns, self.qk_norm, QK_EPS)
        query_width = layer.heads * layer.key_dim
        cache[paging.new_slots()] = qkv[:, query_width:]
        x = x + self.linear("output", attention(layer, paging, cache, qkv[:, :query_width]))
        gate, up = np.split(self.linear("up", normed(x, self.norms[1])), 2, axis=1)
        return x + self.linear("down", gate / (1 + np.exp(-gate)) * up)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    out: np.ndarray = x / np.sqrt((x**2).mean(1, keepdims=True) + EPS) * weight
    return out


def stack_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    dim, value_dim = [(32, 32), (64, 64), (16, 16), (6, 6), (34, 34), (16, 8), (64, 40)][random.integers(7)]
    kv_heads, group = int(random.choice([1, 2])), int(random.choice([1, 2, 3]))
    hidden = int(random.choice([2, 30, 32, 34, 64, 96, 100, 256]))
    inner = operators.panel * int(random.choice([1, 2, 3, 5]))
    layers = [random_layer(random, (dim, value_dim), kv_heads, group) for _ in range(2)]
    is_plain = random.random() < 0.5
    blocks = [Block(operators, random, type, layer, (hidden, inner), is_plain) for layer in layers]
    paging = Paging(random, random_batch(random, 300), 16)
    rotary = int(random.choice([2, dim]))
    rotations = [exact(turns(random, paging.tokens, rotary), True) for _ in range(2)]
    caches = [filled_cache(random, paging, [layer], type) for layer in layers]
    x = AS[type](random.standard_normal((paging.tokens, hidden)))
    kept = None
    if random.random() < 0.6:
        kept = np.sort(random.permutation(paging.tokens)[: random.integers(0, min(paging.tokens, 9) + 1)])
    rows = paging.tokens if kept is None else len(kept)
    numbers = blocks[0].adapters["qkv"].numbers(random, paging.tokens) if "qkv" in blocks[0].adapters else None
    wanted, filled = widen(x), [widen(cache) for cache in caches]
    for block, cache in zip(blocks, filled, strict=True):
        block.numbers = numbers
        wanted = block.run(wanted, paging, cache, rotations)
    structs = (StackLayerStruct * 2)(*(block.struct(rotary) for block in blocks))
    kept_rows = None if kept is None else exact(kept)
    slots = exact(paging.new_slots())

    def run() -> np.ndarray:
        given, out = exact(x, True), exact(np.zeros((rows, hidden), x.dtype), True)
        step = StackStepStruct(
            paging.tokens,
            rows,
            address(given),
            (ctypes.c_void_p * 2)(*map(address, rotations)),
            address(slots),
            address(kept_rows),  # of no rows torch gives a null address
            (ctypes.c_void_p * 2)(*map(address, caches)),
            address(given if kept is None else out),
            address(numbers),
            paging.struct(),
        )
        operators.cpp_stack(type, StackConfigStruct(2, hidden, inner, EPS, QK_EPS, structs), step)
        return given if kept is None else out

    result = operators.same_on_one_thread(run)
    if kept is not None:
        wanted = wanted[kept]
    # Roundings to bfloat16 grow from block to block.
    assert_near(result, wanted, 0.1 if type == BF16 else 1e-3, 1.0 + np.abs(wanted).max(initial=0.0))


def turns(random: np.random.Generator, tokens: int, rotary: int) -> np.ndarray:
    """[tokens, rotary]: cos and sin side by side."""
    angles = random.random((tokens, rotary // 2)) * 6
    out: np.ndarray = np.stack([np.cos(angles), np.sin(angles)], 2).reshape(tokens, rotary).astype(np.float32)
    return out
