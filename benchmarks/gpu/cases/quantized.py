"""Quantized matrices: products against float64 (S1), and their time beside bfloat16's of the same sizes (S4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases.tally import Tally, limit_of, poison_memory
from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.timing import Timing, captured, measure
from model_server.distributed.group import ProcessGroup
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.quantization.forms import Form, Plain
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.float8 import Fp8

ROWS = (1, 7, 16, 17, 32, 33, 64, 257)
SIZES = ((4096, 4096), (6144, 14336), (1003, 1040))
TINY_SIZES = ((96, 64), (33, 80))
# Of an 8B model's gate and up; so many matrices that none is still in the card's cache when its turn comes again.
TIMED = (28672, 4096)
TINY_TIMED = (64, 96)
COPIES = 8
TIMED_ROWS = (1, 8, 32, 256, 2048)

Make = Callable[[Context, int, int], Form]


def _codes(bits: int, group: int | None) -> Make:
    def make(context: Context, out: int, columns: int) -> Codes:
        width = min(group or columns, columns)
        groups, device = -(-columns // width), context.device
        codes = torch.randint(0, 2**bits, (out, columns), dtype=torch.uint8, device=device)
        scales = torch.rand(out, groups, device=device).add_(0.5).div_(2 ** (bits - 1) * columns**0.5).half()
        zeros = torch.full((out, groups), 2 ** (bits - 1), dtype=torch.uint8, device=device)
        return Codes.of(codes, scales, zeros, width, bits)

    return make


def _float8(height: int | None, width: int | None, *, inputs: bool = False) -> Make:
    def make(context: Context, out: int, columns: int) -> Fp8:
        block = min(height or out, out), min(width or columns, columns)
        weight = torch.randn(out, columns, device=context.device).mul_(100).clamp_(-448, 448)
        scales = torch.rand(-(-out // block[0]), -(-columns // block[1]), device=context.device)
        return Fp8(weight.to(torch.float8_e4m3fn), scales.add_(0.5).div_(100 * columns**0.5), block, inputs)

    return make


def _plain(context: Context, out: int, columns: int) -> Plain:
    return Plain(torch.randn(out, columns, device=context.device).div_(columns**0.5).bfloat16())


CHECKED: dict[str, Make] = {
    "int4 in groups of 128": _codes(4, 128),
    "int4 in groups of 32": _codes(4, 32),
    "int8 by rows": _codes(8, None),
    "fp8": _float8(None, None),
    "fp8 by rows": _float8(1, None),
    "fp8 by blocks": _float8(128, 128),
}
COMPARED = {name: CHECKED[name] for name in ("int4 in groups of 128", "int8 by rows", "fp8 by rows", "fp8 by blocks")}
COMPARED["fp8 by rows for 8-bit activations"] = _float8(1, None, inputs=True)


def run_products(context: Context) -> None:
    """What the factory makes of every form, of few and many rows."""
    tally = Tally(context, "quantized products")
    for dtype in (torch.bfloat16, torch.float16):
        linears = LinearFactory(context.device, dtype)
        for name, make in CHECKED.items():
            for out, columns in TINY_SIZES if context.tiny else SIZES:
                form = make(context, out, columns)
                linear = linears.make(form)
                exact = form.dequantize(torch.float32).double()
                for rows in ROWS[:3] if context.tiny else ROWS:
                    case = f"{name}, {rows}x{columns}x{out} {dtype}"
                    if not context.has_time(3):
                        tally.left_out(case)
                        continue
                    x = torch.randn(rows, columns, device=context.device).to(dtype)
                    poison_memory(context.device)
                    # Elements are rounded to the type before they are multiplied.
                    tally.compare(case, linear(x), F.linear(x.double(), exact), 2 * limit_of(dtype))
    tally.tell()


def run_speed(context: Context) -> None:
    """Each kind after the plain one, by the same number of matrices; ratios above 1: the quantized one is faster."""
    out, columns = TINY_TIMED if context.tiny else TIMED
    for rows in TIMED_ROWS[:2] if context.tiny else TIMED_ROWS:
        titles = {kind: f"{kind} product n={rows}" for kind in COMPARED}
        if not context.has_time(12):
            for title in titles.values():
                context.skip(title, "no time left")
            continue
        plain = _time(context, _plain, out, columns, rows)
        for kind, title in titles.items():
            timing = _time(context, COMPARED[kind], out, columns, rows)
            context.figure(
                title,
                timing.seconds,
                "s",
                spread=max(timing.spread, plain.spread),
                peer=plain.seconds / timing.seconds,
                detail=f"peer: bfloat16 by {plain.seconds * 1e6:.0f} us; {out}x{columns}",
            )


def _time(context: Context, make: Make, out: int, columns: int, rows: int) -> Timing:
    """Of one product, one after the other with all copies in a CUDA graph."""
    linears = LinearFactory(context.device, torch.bfloat16)
    made = [linears.make(make(context, out, columns)) for _ in range(2 if context.tiny else COPIES)]
    linears.measure(ProcessGroup())
    x = torch.randn(rows, columns, device=context.device).bfloat16()
    timing = measure(captured(lambda: _all(made, x), context.device), context.device, repeats=2 if context.tiny else 50)
    return Timing(timing.seconds / len(made), timing.spread, timing.count)


def _all(linears: Sequence[Linear], x: torch.Tensor) -> None:
    for linear in linears:
        linear(x)
