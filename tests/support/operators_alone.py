"""Runs the C++ operators of an unpacked wheel without torch or numpy: `python operators_alone.py FOLDER`.

FOLDER holds the package `model_server`. Prints the instruction set that is used here, and hashes of what the greedy
choice, products, norms and attention give for the same numbers everywhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from array import array

# Wide enough for several panels, the last of them not full.
OUTPUTS, INPUTS = 72, 128
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16


def numbers(count: int, kind: int, seed: int) -> array[float] | array[int]:
    """Of float32 (kind 0) or bfloat16 (1, the upper half of a float), between -1 and 1."""
    draw = random.Random(seed).uniform
    floats = array("f", (draw(-1, 1) for _ in range(count)))
    return floats if kind == 0 else array("H", memoryview(floats).cast("B").cast("H")[1::2])


def nothing(count: int, kind: int) -> array[float] | array[int]:
    return array("Hf"[kind == 0], bytes((4, 2)[kind] * count))


def address(values: array[float] | array[int]) -> int:
    return values.buffer_info()[0]


def product(operators: ctypes.CDLL, kind: int, rows: int) -> bytes:
    panel = operators.cpp_panel()
    weight, x = numbers(OUTPUTS * INPUTS, kind, 1), numbers(rows * INPUTS, kind, 2)
    panels, out = nothing((OUTPUTS + panel - 1) // panel * panel * INPUTS, kind), nothing(rows * OUTPUTS, kind)
    operators.cpp_pack(kind, address(weight), address(panels), OUTPUTS, INPUTS)
    operators.cpp_linear(kind, address(panels), None, OUTPUTS, INPUTS, address(x), INPUTS, rows, address(out), 0)
    return out.tobytes()


def norm(operators: ctypes.CDLL, kind: int) -> bytes:
    x, weight, out = numbers(3 * INPUTS, kind, 3), numbers(INPUTS, 0, 4), nothing(3 * INPUTS, kind)
    operators.cpp_rms_norm(kind, address(x), None, address(weight), 1, 1e-5, address(out), 3, INPUTS)
    return out.tobytes()


def attention(operators: ctypes.CDLL, kind: int, queries: int, keys: int) -> bytes:
    from model_server.cpp.structs import AttentionShapeStruct, PagingStruct

    width, blocks = 2 * KV_HEADS * HEAD_DIM, (keys + BLOCK - 1) // BLOCK
    shape = AttentionShapeStruct(
        HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, KV_HEADS * HEAD_DIM, width, 0, 0, HEAD_DIM**-0.5, 0.0, None, None
    )
    table, lengths, starts = array("i", reversed(range(blocks))), array("i", [keys]), array("i", [0, queries])
    paging = PagingStruct(address(table), address(lengths), address(starts), 1, blocks, BLOCK)
    cache, query = numbers(blocks * BLOCK * width, kind, 5), numbers(queries * HEADS * HEAD_DIM, kind, 6)
    out = nothing(queries * HEADS * HEAD_DIM, kind)
    operators.cpp_attend(kind, shape, paging, address(cache), address(query), HEADS * HEAD_DIM, address(out))
    return out.tobytes()


def greedy(operators: ctypes.CDLL) -> bytes:
    logits, ids, floats = numbers(3 * 1000, 0, 7), array("q", bytes(24)), array("f", bytes(24))
    operators.cpp_greedy(address(logits), 3, 1000, 1000, address(ids), address(floats), address(floats) + 12)
    return ids.tobytes() + floats.tobytes()


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    from model_server.cpp.config import instruction_set_cap
    from model_server.cpp.instruction_sets import module, path, survey
    from model_server.cpp.structs import FUNCTIONS

    chosen = survey(instruction_set_cap()).chosen
    print(chosen)
    if chosen is None:
        return
    operators = ctypes.CDLL(str(path(module(chosen))))
    for name, arguments in FUNCTIONS.items():
        getattr(operators, name).argtypes = arguments
    results = [greedy(operators)]
    for kind in (0, 1):
        results += [product(operators, kind, rows) for rows in (1, 2, 8, 33)]
        results += [norm(operators, kind), attention(operators, kind, 40, 70), attention(operators, kind, 1, 300)]
    print(*(hashlib.sha256(result).hexdigest()[:16] for result in results))


if __name__ == "__main__":
    main(sys.argv[1])
