"""What formats share: sizes, kept rows, and block scales."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.grouped import SMALLEST_CUT, finite, too_small
from model_server.quantization.forms.float8 import columns_of_blocks
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import FLOATING, Range, WeightReader

SCALES = ("weight_scale_inv", "weight_scale")
# Of the activations of a module, which are not quantized, or with a scale for each token.
_OF_INPUTS = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "input_scale_ub")
# Bytes are exponents of two.
_SCALE_TYPES = (*FLOATING, "U8", "F8_E8M0")


def refuse_stacks(wanted: MatrixSlice, *, serves_transposed: bool = False) -> None:
    """Refuse stacked experts, and [in, out] where the format stores it differently."""
    name = wanted.parts[0].name
    if wanted.expert is not None:
        raise StartupError(f"weight {name} holds all experts in one quantized tensor; only plain ones are served so")
    if wanted.transposed and not serves_transposed:
        raise StartupError(f"weight {name} is quantized and stored as [in, out]; only plain weights are served so")


def skip_inputs(reader: WeightReader, module: str) -> None:
    """Skip what a checkpoint says of a module's inputs."""
    reader.skip(*(f"{module}.{name}" for name in _OF_INPUTS))


def block_scales(
    reader: WeightReader, module: str, size: tuple[int, int], block: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """Read all scales [blocks down, blocks across], and the size of their blocks.

    Args:
        block: Where the scales are blocks.
    """
    found = next((name for name in SCALES if reader.has(f"{module}.{name}")), None)
    if found is None:
        raise StartupError(f"weight {module}.{SCALES[-1]} does not exist, but the numbers that it scales do")
    name = f"{module}.{found}"
    if reader.stored(name) not in _SCALE_TYPES:
        raise StartupError(f"weight {name} is stored as {reader.stored(name)}, not as floating point numbers")
    scales = reader.raw(name)
    finite(name, (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float())
    if scales.numel() == 1:
        return scales.view(1, 1), size
    shape = (len(scales), scales.numel() // max(len(scales), 1))
    even = size[0] // max(shape[0], 1), size[1] // max(shape[1], 1)
    for height, width in (block, (1, even[1]), even):
        if height and width and shape == (-(-size[0] // height), -(-size[1] // width)):
            return scales.view(shape), (height, width)
    raise StartupError(
        f"weight {name} has shape {list(reader.shape(name))}; blocks of {list(block)} of a matrix {list(size)} "
        f"ask for {[-(-size[0] // block[0]), -(-size[1] // block[1])]}"
    )


def kept_rows(part: Part, device: torch.device) -> Tensor:
    """Return the stored rows that `part` keeps, in the model's order, [n] int64."""
    rows = torch.cat([torch.arange(*kept, device=device) for kept in part.rows])
    return rows if part.order is None else part.order.apply(rows)


def cut_columns(scales: Tensor, width: int, columns: Range, name: str, whole: int) -> tuple[Tensor, int]:
    """Cut `columns_of_blocks`, if blocks do not get too small."""
    cut, divided = columns_of_blocks(scales, width, columns)
    if divided < min(SMALLEST_CUT, width) and cut.shape[-1] > 1:
        raise too_small(name, width, divided, whole, columns[1] - columns[0])
    return cut, divided


def expect_size(reader: WeightReader, name: str, num_rows: int | None, num_columns: int | None) -> tuple[int, int]:
    """Return a stored matrix's size, which must be this."""
    shape = reader.shape(name)
    for dimension, asked in enumerate((num_rows, num_columns)):
        if len(shape) != 2 or (asked is not None and shape[dimension] != asked):
            what = "a matrix" if asked is None else f"{asked} at dimension {dimension}"
            raise StartupError(f"weight {name} has shape {list(shape)}; the config asks for {what}")
    return shape[0], shape[1]
