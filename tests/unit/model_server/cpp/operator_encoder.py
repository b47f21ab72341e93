"""A whole stack of an encoder's blocks, with every one of its options."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
from operator_attention import Layer, Paging, filled_cache, rotated
from operator_stack import turns
from support.cpp_operators import AS, BF16, Operators, address, assert_near, exact, widen

from model_server.cpp.structs import (
    EncoderConfigStruct,
    EncoderLayerStruct,
    EncoderMatrixStruct,
    EncoderNormStruct,
    EncoderStepStruct,
    PagingStruct,
)

EPS = 1e-5


def _gelu(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = x * (1 + np.vectorize(math.erf, [np.float64])(x / math.sqrt(2))) / 2
    return out


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return out


def _silu(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = x / (1 + np.exp(-x))
    return out


def _relu(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.maximum(x, 0)
    return out


# By their numbers.
ACTIVATIONS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (_gelu, _gelu_tanh, _silu, _relu)


class EncoderBlock:
    """The weights of one block, and what keeps the memory of its packed ones."""

    def __init__(
        self, operators: Operators, random: np.random.Generator, type: int, layer: Layer, sizes: tuple[int, int, int]
    ) -> None:
        hidden, inner, self.activation = sizes
        self.layer = layer
        width = layer.heads * layer.key_dim
        self.is_gated, self.norms_after = False, True
        self.hidden, self.inner = hidden, inner
        self.sizes = {"qkv": (width + layer.row_width, hidden), "output": (hidden, width), "down": (hidden, inner)}
        self.rope = int(random.integers(-1, 2))
        self._operators, self._random, self._type = operators, random, type

    def fill(self, *, is_gated: bool, norms_after: bool, has_first_norm: bool) -> None:
        """Make its numbers."""
        operators, random, type = self._operators, self._random, self._type
        self.is_gated, self.norms_after = is_gated, norms_after
        self.sizes["up"] = ((1 + is_gated) * self.inner, self.hidden)
        self.weights = {n: AS[type](random.standard_normal(s) / np.sqrt(s[1])) for n, s in self.sizes.items()}
        self.panels = {n: operators.packed(type, w) for n, w in self.weights.items()}
        self.biases = {
            n: exact(AS[type](random.standard_normal(s[0])), True) if random.random() < 0.6 else None
            for n, s in self.sizes.items()
        }
        self.norms: list[tuple[np.ndarray, np.ndarray | None] | None] = [
            (self._vector(), self._vector() if random.random() < 0.6 else None) for _ in range(2)
        ]
        if not has_first_norm and not norms_after:
            self.norms[0] = None

    def _vector(self) -> np.ndarray:
        return exact(self._random.standard_normal(self.hidden).astype(np.float32), True)

    def struct(self, rotary: int, paging: int) -> EncoderLayerStruct:
        norms = [
            EncoderNormStruct() if norm is None else EncoderNormStruct(address(norm[0]), address(norm[1]))
            for norm in self.norms
        ]
        matrices = [
            EncoderMatrixStruct(address(self.panels[n]), address(self.biases[n]), *self.sizes[n])
            for n in ("qkv", "output", "up", "down")
        ]
        return EncoderLayerStruct(*norms, *matrices, self.rope, rotary, paging, self.layer.struct())

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.biases[name]
        out: np.ndarray = x @ widen(self.weights[name]).T + (0 if bias is None else widen(bias))
        return out

    def _norm(self, number: int, x: np.ndarray) -> np.ndarray:
        norm = self.norms[number]
        if norm is None:
            return x
        weight, bias = norm
        off = x - x.mean(1, keepdims=True)
        out: np.ndarray = off / np.sqrt((off**2).mean(1, keepdims=True) + EPS) * weight
        return out if bias is None else out + bias

    def run(self, x: np.ndarray, paging: Paging, last_keys: np.ndarray, rotations: list[np.ndarray]) -> np.ndarray:
        """x [tokens, hidden] -> the same, in float64."""
        x = self._add(0, x, lambda read: self._attended(read, paging, last_keys, rotations))
        return self._add(1, x, self._mlp)

    def _add(self, number: int, x: np.ndarray, part: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        if self.norms_after:
            return self._norm(number, x + part(x))
        return x + part(self._norm(number, x))

    def _mlp(self, x: np.ndarray) -> np.ndarray:
        up = self._linear("up", x)
        function = ACTIVATIONS[self.activation]
        if not self.is_gated:
            return self._linear("down", function(up))
        gate, up = np.split(up, 2, axis=1)
        return self._linear("down", function(gate) * up)

    def _attended(
        self, x: np.ndarray, paging: Paging, last_keys: np.ndarray, rotations: list[np.ndarray]
    ) -> np.ndarray:
        layer = self.layer
        turned = None if self.rope < 0 else rotations[self.rope]
        qkv = rotated(self._linear("qkv", x), layer.heads + layer.kv_heads, layer.key_dim, turned, None, EPS)
        out = np.empty((len(x), layer.heads, layer.value_dim))
        for start, stop in zip(paging.starts, paging.starts[1:], strict=False):
            rows, keys = qkv[start:stop], np.arange(stop - start)
            seen = keys <= last_keys[start:stop, None]
            seen &= keys >= np.array([layer.first_visible(int(position)) for position in keys])[:, None]
            for head in range(layer.heads):
                kv_head = head // (layer.heads // layer.kv_heads)
                query = rows[:, head * layer.key_dim :][:, : layer.key_dim]
                stored = rows[:, layer.heads * layer.key_dim :]
                key = stored[:, kv_head * layer.key_dim :][:, : layer.key_dim]
                value = stored[:, layer.value_offset + kv_head * layer.value_dim :][:, : layer.value_dim]
                scores = np.where(seen, query @ key.T * layer.scale, -np.inf)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                out[start:stop, head] = weights @ value / weights.sum(1, keepdims=True)
        return self._linear("output", out.reshape(len(x), -1))


def encoder_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    dim = int(random.choice([6, 16, 32, 34, 64]))
    kv_heads, group = int(random.choice([1, 2])), int(random.choice([1, 2]))
    hidden = int(random.choice([30, 32, 34, 64, 96, 100]))
    inner = operators.panel * int(random.choice([1, 2, 3]))
    activation, norms_after = int(random.integers(len(ACTIVATIONS))), random.random() < 0.5
    is_gated, window = random.random() < 0.5, int(random.choice([0, 1, 5, 40]))
    layers = [Layer(kv_heads * group, kv_heads, dim, dim, window=w) for w in (0, window)]
    if random.random() < 0.3:
        layers.reverse()
    blocks = [EncoderBlock(operators, random, type, layer, (hidden, inner, activation)) for layer in layers]
    for number, block in enumerate(blocks):
        block.fill(is_gated=is_gated, norms_after=norms_after, has_first_norm=number > 0)
    lengths = [int(random.choice([1, 2, 15, 16, 17, 33, 70, 300])) for _ in range(random.integers(1, 5))]
    paging = Paging(random, [(length, length) for length in lengths], 16)
    rotary = int(random.choice([2, dim // 2 * 2]))
    rotations = [exact(turns(random, paging.tokens, rotary), True) for _ in range(2)]
    cache = filled_cache(random, paging, layers, type)  # one for all layers
    ends = np.repeat(np.array(lengths) - 1, lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    reach = [exact(ends), exact(np.minimum(ends, positions + window - 1) if window else ends)]
    x = AS[type](random.standard_normal((paging.tokens, hidden)))
    wanted = widen(x)
    for block in blocks:
        wanted = block.run(wanted, paging, reach[block.layer.window > 0], rotations)
    structs = (EncoderLayerStruct * 2)(*(block.struct(rotary, int(block.layer.window > 0)) for block in blocks))
    config = EncoderConfigStruct(2, hidden, inner, norms_after, is_gated, activation, EPS, structs)
    pagings = (PagingStruct * 2)(paging.struct(), paging.struct())
    for struct, last in zip(pagings, reach, strict=True):
        struct.last_keys = address(last)
    slots = exact(paging.new_slots())

    def run() -> np.ndarray:
        given = exact(x, True)
        step = EncoderStepStruct(
            paging.tokens,
            len(pagings),
            address(given),
            (ctypes.c_void_p * 2)(*map(address, rotations)),
            address(slots),
            (ctypes.c_void_p * 2)(address(cache), address(cache)),
            pagings,
        )
        operators.cpp_encoder_stack(type, config, step)
        return given

    # Roundings to bfloat16 grow from block to block.
    assert_near(operators.same_on_one_thread(run), wanted, 0.1 if type == BF16 else 1e-3, 1.0 + np.abs(wanted).max())
