"""What adapters of random ranks add to a product, each for its own rows."""

from __future__ import annotations

import ctypes

import numpy as np
from support.cpp_operators import AS, FLOAT, TOLERANCE, Operators, address, assert_near, exact, rows_apart, widen

from model_server.cpp.structs import AdapterExpansionStruct, AdapterFactorsStruct


class Adapters:
    """Some adapters of one product, one of which adds nothing to it. A [inner, inputs], Bs by their first output."""

    def __init__(
        self, operators: Operators, random: np.random.Generator, type: int, outputs: int, inputs: int, number: int = 3
    ) -> None:
        self.structs = (AdapterFactorsStruct * (number + 1))()
        self._deltas: list[np.ndarray] = []
        self._modules: list[list[tuple[int, int, np.ndarray, np.ndarray]]] = []
        self._scaled: list[tuple[np.ndarray | float, np.ndarray | float]] = []
        self._kept: list[object] = []
        for place in range(number):
            self._deltas.append(self._add(operators, random, type, place, outputs, inputs))
        self._deltas.append(np.zeros((outputs, inputs)))
        self._scaled.append((1.0, 0.0))

    def numbers(self, random: np.random.Generator, rows: int) -> np.ndarray:
        """Of each row, -1 where it has none."""
        return exact(random.integers(-1, len(self._deltas), rows))

    def applied(self, numbers: np.ndarray, x: np.ndarray, base: np.ndarray) -> np.ndarray:
        """base: the base model's product; [rows, outputs] in float64."""
        out = base.copy()
        for place, (delta, (gain, shift)) in enumerate(zip(self._deltas, self._scaled, strict=True)):
            rows = numbers == place
            out[rows] = (base[rows] + x[rows] @ delta.T) * gain + shift
        return out

    def sizes(self, numbers: np.ndarray, x: np.ndarray, base: np.ndarray) -> np.ndarray:
        """What `applied` sums up, without signs: roundings of the sums, and of what A gives, are parts of it."""
        out = np.abs(base)
        for place, (modules, (gain, shift)) in enumerate(zip(self._modules, self._scaled, strict=False)):
            rows = numbers == place
            for start, stop, a, b in modules:
                out[rows, start:stop] += np.abs(x[rows] @ a.T) @ np.abs(b).T
            out[rows] = out[rows] * gain + np.abs(shift)
        return out

    def _add(
        self, operators: Operators, random: np.random.Generator, type: int, place: int, outputs: int, inputs: int
    ) -> np.ndarray:
        """The modules of one adapter: neighbours among the outputs, with A of their own or one for all."""
        panel = operators.panel
        ends = np.unique([*random.integers(1, outputs + 1, 2), outputs])
        starts = [0, *ends[:-1].tolist()]
        ranks = [int(random.choice([1, 3, 4, 8, 16, 17])) for _ in starts]
        a = exact(AS[type](random.standard_normal((sum(ranks), inputs)) / np.sqrt(inputs)))
        expansions = (AdapterExpansionStruct * len(starts))()
        delta, first = np.zeros((outputs, inputs)), 0
        modules: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        for i, (start, stop, rank) in enumerate(zip(starts, ends.tolist(), ranks, strict=True)):
            b = AS[type](random.standard_normal((stop - start, rank)))
            begin, end = start // panel, -(-stop // panel)
            filled = np.zeros(((end - begin) * panel, rank + rank % 2), b.dtype)
            filled[start - begin * panel : stop - begin * panel, :rank] = b
            packed = operators.packed(type, filled)
            expansions[i] = AdapterExpansionStruct(begin, end - begin, first, filled.shape[1], address(packed))
            modules.append((start, stop, widen(a[first : first + rank]), widen(b)))
            delta[start:stop] = modules[-1][3] @ modules[-1][2]
            self._kept.append(packed)
            first += rank
        pointer = ctypes.cast(expansions, ctypes.POINTER(AdapterExpansionStruct))
        gain = exact(random.random(outputs).astype(np.float32) + 0.5) if random.random() < 0.4 else None
        shift = exact(random.standard_normal(outputs).astype(np.float32)) if random.random() < 0.4 else None
        self._scaled.append((1.0 if gain is None else gain, 0.0 if shift is None else shift))
        self.structs[place] = AdapterFactorsStruct(
            address(a), len(a), len(starts), pointer, address(gain), address(shift)
        )
        self._kept += [a, expansions, gain, shift]
        self._modules.append(modules)
        return delta


def adapter_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """Any number of rows: as numpy has it, and bit for bit what each row gets alone."""
    outputs = int(random.choice([1, 15, 16, 33, 64, 100, 600]))
    inputs, rows = int(random.choice([2, 16, 30, 32, 34, 100, 576])), int(random.choice([1, 3, 8, 40]))
    adapters = Adapters(operators, random, type, outputs, inputs)
    numbers = adapters.numbers(random, rows)
    x, stride = AS[type](random.standard_normal((rows, inputs))), inputs + int(random.choice([0, 1, 32]))
    is_wide = type == FLOAT or random.random() < 0.5
    base = random.standard_normal((rows, outputs)).astype(np.float32)
    base = base if is_wide else AS[type](base)

    def product(first: int, last: int) -> np.ndarray:
        out, own = exact(base[first:last], True), exact(numbers[first:last])
        given = rows_apart(x[first:last], stride, True)
        operators.cpp_adapt(
            type, adapters.structs, address(own), address(given), stride, inputs, last - first, address(out), outputs,
            is_wide and type != FLOAT,
        )  # fmt: skip
        return out

    whole = operators.same_on_one_thread(lambda: product(0, rows))
    wanted = adapters.applied(numbers, widen(x), widen(base))
    # What A gives is rounded to bfloat16 where there are instructions for its products, as it is by PEFT.
    sizes = adapters.sizes(numbers, widen(x), widen(base))
    assert_near(whole, wanted, 1e-4 if type == FLOAT else 2.0**-8 if is_wide else TOLERANCE[type], 1 + sizes)
    np.testing.assert_array_equal(whole[numbers < 0], base[numbers < 0])
    row = int(random.integers(rows))
    np.testing.assert_array_equal(product(row, row + 1)[0], whole[row])
