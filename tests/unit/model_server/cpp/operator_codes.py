"""Matrices of codes and of 8-bit floats: packed, multiplied, and what numpy makes of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import numpy as np
from support.cpp_operators import AS, BF16, DTYPE, FLOAT, Operators, address, assert_near, exact, rows_apart, widen

from model_server.cpp.structs import CodeShapeStruct

# A group's inputs; one group a row is as wide as the matrix.
GROUPS = 16, 32, 40, 128, 136, 264, 512
WIDTHS = 2, 6, 8, 20, 64, 128, 200, 256, 258, 300, 528, 776
OUTPUTS = 1, 15, 16, 31, 32, 33, 64, 65, 100, 200


def random_numbers(random: np.random.Generator, kind: str, shape: tuple[int, int], group: int) -> np.ndarray:
    """Of [outputs, groups], about 1 and below: any floats, those of 16 bits, or of each 256 inputs multiples of one."""
    if kind == "floats":
        return random.random(shape).astype(np.float32)
    numbers = random.random(shape).astype(np.float16).astype(np.float32)
    if kind == "steps":
        numbers = numbers[:, np.arange(shape[1]) * group // 256 % shape[1]] * random.integers(-128, 128, shape)
        numbers /= np.float32(128)
    return numbers.astype(np.float32)


@dataclass
class Codes:
    """codes [outputs, columns]; scales, zeros and, if there are any, offsets [outputs, groups].

    order: the input of each column, or None. levels: of codes of 4 bits, [16], or None.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: int
    bits: int
    inputs: int
    order: np.ndarray | None
    levels: np.ndarray | None = None
    offsets: np.ndarray | None = None

    @classmethod
    def random(cls, random: np.random.Generator, outputs: int, inputs: int) -> Codes:
        columns = inputs if random.random() < 0.8 else inputs + 16
        order = None
        if columns != inputs or random.random() < 0.2:
            order = exact(random.integers(0, inputs, columns).astype(np.int32))
        group = min(int(random.choice(GROUPS)), columns) if random.random() < 0.7 else columns
        bits = int(random.choice([4, 8])) if columns % 2 == 0 else 8
        if columns % 32 == group % 32 == 0:
            bits = int(random.choice([4, 5, 6, 8]))
        shape = outputs, -(-columns // group)
        zeros = random.integers(0, 2**bits, shape) if random.random() < 0.5 else np.full(shape, 2 ** (bits - 1))
        kind = str(random.choice(["floats", "halves", "steps"]))
        scales = random_numbers(random, kind, shape, group) / np.float32(2 ** (bits + np.ceil(np.log2(columns) / 2)))
        codes = random.integers(0, 2**bits, (outputs, columns)).astype(np.uint8)
        levels = None
        if bits == 4 and random.random() < 0.4:
            levels = exact(random.integers(0, 256, 16).astype(np.uint8))
            scales /= 16  # as large numbers as codes of 4 bits are
        offsets = None
        if order is None and random.random() < 0.3:
            zeros = np.zeros(shape)
            offsets = random_numbers(random, kind, shape, group) / np.float32(2 ** np.ceil(np.log2(columns) / 2))
        return cls(codes, scales, zeros.astype(np.uint8), group, bits, inputs, order, levels, offsets)

    def pack(self, operators: Operators, bias: np.ndarray | None = None) -> CodeShapeStruct:
        """The structure; it keeps the memory of its panels, but not that of the bias."""
        first = int(self.zeros[0, 0])
        struct = CodeShapeStruct(
            bias=address(bias),
            order=address(self.order),
            outputs=len(self.codes),
            inputs=self.inputs,
            columns=self.codes.shape[1],
            bits=self.bits,
            group=self.group,
            zero=first if (self.zeros == first).all() else -1,
            levels=address(self.levels),
            has_offsets=self.offsets is not None,
        )
        stored = self.codes if self.bits != 4 else self.codes[:, ::2] | self.codes[:, 1::2] << 4
        scales = exact(self.scales)
        offsets = None if self.offsets is None else exact(self.offsets)
        struct.numbers = operators.cpp_number_kind(ctypes.byref(struct), address(scales), address(offsets))
        panels = exact(np.zeros(operators.cpp_code_bytes(ctypes.byref(struct)), np.uint8))
        operators.cpp_pack_codes(
            ctypes.byref(struct),
            address(exact(stored)),
            address(scales),
            address(exact(self.zeros)),
            address(offsets),
            address(panels),
        )
        struct.panels = address(panels)
        struct.kept = panels
        return struct

    def decoded(self) -> np.ndarray:
        """[outputs, inputs] in float64."""
        groups = np.arange(self.codes.shape[1]) // self.group
        numbers = self.codes if self.levels is None else self.levels[self.codes]
        values = (numbers.astype(np.float64) - self.zeros[:, groups]) * self.scales[:, groups]
        if self.offsets is not None:
            values -= self.offsets[:, groups]
        if self.order is None:
            return values
        out = np.zeros((len(values), self.inputs))
        np.add.at(out.T, self.order, values.T)
        return out


@dataclass
class Float8:
    """weight [outputs, inputs]: bytes of e4m3, or codes of `table` [16] (of bfloat16); scales [outputs, groups]."""

    weight: np.ndarray
    scales: np.ndarray
    group: int
    table: np.ndarray | None = None

    @classmethod
    def random(cls, random: np.random.Generator, outputs: int, inputs: int) -> Float8:
        group = min(int(random.choice(GROUPS)), inputs) if random.random() < 0.5 else inputs
        weight = random.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        weight[weight & 0x7F == 0x7F] = 1  # NaN
        scales = (random.random((outputs, -(-inputs // group))) / 100 / np.sqrt(inputs)).astype(np.float32)
        table = None
        if random.random() < 0.5:
            weight, table = weight & 15, exact(widen(AS[BF16](random.random(16) * 100 - 50)).astype(np.float32))
        return cls(weight, scales, group, table)

    def pack(self, operators: Operators, type: int, bias: np.ndarray | None = None) -> CodeShapeStruct:
        """The structure; it keeps the memory of its panels, but not that of the bias."""
        outputs, inputs = self.weight.shape
        struct = CodeShapeStruct(
            bias=address(bias),
            outputs=outputs,
            inputs=inputs,
            columns=inputs,
            bits=8 if self.table is None else 4,
            group=self.group,
            is_float8=1,
            table=address(self.table),
        )
        stored = self.weight if self.table is None else self.weight[:, ::2] | self.weight[:, 1::2] << 4
        panels = exact(np.zeros(operators.cpp_code_bytes(ctypes.byref(struct)), np.uint8))
        operators.cpp_pack_float8(
            type, ctypes.byref(struct), address(exact(stored)), address(exact(self.scales)), address(panels)
        )
        struct.panels = address(panels)
        struct.kept = panels
        return struct

    def decoded(self) -> np.ndarray:
        """[outputs, inputs] in float64."""
        scales = self.scales[:, np.arange(self.weight.shape[1]) // self.group]
        if self.table is not None:
            return self.table.astype(np.float64)[self.weight] * scales
        size, sign = (self.weight & 0x7F).astype(np.int64), np.where(self.weight & 0x80, -1.0, 1.0)
        exponent, mantissa = size >> 3, (size & 7) / 8
        values = np.where(exponent, np.exp2(exponent - 7.0) * (1 + mantissa), np.exp2(-6.0) * mantissa)
        return sign * values * scales


def float8_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """The same of floats, which round nothing."""
    outputs, inputs = int(random.choice(OUTPUTS)), int(random.choice(WIDTHS))
    form = Float8.random(random, outputs, inputs)
    bias = exact(AS[type](random.standard_normal(outputs)), True) if random.random() < 0.5 else None
    decoded = form.decoded()
    _check(operators, random, type, form.pack(operators, type, bias), decoded, np.abs(decoded).sum(1), bias, 1e-6)


def code_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """One matrix by several numbers of rows: bit for bit the same, of which the largest is compared with numpy."""
    outputs, inputs = int(random.choice(OUTPUTS)), int(random.choice(WIDTHS))
    if random.random() < 0.1:
        outputs, inputs = 600, 256  # shared among threads
    form = Codes.random(random, outputs, inputs)
    bias = exact(AS[type](random.standard_normal(outputs)), True) if random.random() < 0.5 else None
    # Numbers of a chunk are rounded to a step of the largest one: half a step of 127 * 128 is 3.1e-5.
    bound = 1e-6 if type == FLOAT else 4e-5
    decoded = form.decoded()
    sizes = np.abs(decoded).sum(1)
    if form.offsets is not None:  # sums are rounded before offsets are subtracted
        sizes += np.abs(form.offsets).sum(1) * form.group
    _check(operators, random, type, form.pack(operators, bias), decoded, sizes, bias, bound)


def _check(
    operators: Operators,
    random: np.random.Generator,
    type: int,
    struct: CodeShapeStruct,
    weight: np.ndarray,
    sizes: np.ndarray,
    bias: np.ndarray | None,
    bound: float,
) -> None:
    """sizes [outputs]: of each the sum of what it multiplies with; `bound` is in these."""
    outputs, inputs = weight.shape
    most = int(random.choice([40, 70, 300]))  # more than a block of row tiles has
    x = AS[type](random.standard_normal((most, inputs)) * np.exp2(random.integers(-8, 9, (most, 1))))
    stride = inputs + int(random.choice([0, 1, 32]))
    is_shifted = random.random() < 0.5

    def product(rows: int, is_wide: int) -> np.ndarray:
        out = exact(np.full((rows, outputs), 7, np.float32 if is_wide else DTYPE[type]), is_shifted)
        given = rows_apart(x[:rows], stride, is_shifted)
        operators.cpp_code_linear(type, ctypes.byref(struct), address(given), stride, rows, address(out), is_wide)
        return out

    whole = [operators.same_on_one_thread(partial(product, most, is_wide)) for is_wide in (0, 1)]
    added = 0 if bias is None else widen(bias)
    scale = np.abs(widen(x)).max(1, keepdims=True) * sizes + np.abs(added) + 1e-6
    assert_near(whole[1], widen(x) @ weight.T + added, bound, scale)
    np.testing.assert_array_equal(whole[0], AS[type](whole[1]))  # rounded once
    for rows in random.choice(most, 8, replace=False):
        is_wide = int(random.random() < 0.5)
        np.testing.assert_array_equal(product(int(rows), is_wide), whole[is_wide][:rows], f"{rows} rows")
