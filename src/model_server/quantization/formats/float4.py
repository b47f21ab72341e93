"""4-bit floats (E2M1) of compressed-tensors and modelopt: NVFP4 and MXFP4."""

# `{module}.weight_packed` (compressed-tensors) or `{module}.weight` (modelopt), uint8 [out, in / 2], the first of two
# numbers in the lower bits. `{module}.weight_scale` [out, groups]: of NVFP4 e4m3, and a number of the whole matrix,
# `weight_global_scale`, which divides them, or `weight_scale_2`, which multiplies them; of MXFP4 exponents of two.
# Scales of activations are not read: products keep their inputs in 16 bits or more.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.e2m1 import keep_part, powers
from model_server.quantization.formats.common.grouped import finite
from model_server.quantization.formats.common.storage import refuse_stacks, skip_inputs
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes, cat
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import WeightReader

_PACKED, _PLAIN_NAME = ".weight_packed", ".weight"
_EXPONENTS = ("U8", "F8_E8M0")
_SCALE_TYPES = ("F8_E4M3", *_EXPONENTS, "F32", "F16", "BF16")


class Float4Format:
    """Sizes of groups follow from the tensors."""

    def __init__(self, config: Mapping[str, Any]) -> None: ...

    def claims(self, reader: WeightReader, module: str) -> bool:
        return reader.has(module + ".weight_scale") and _name_of(reader, module) is not None

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted)
        return cat([_part(reader, part, wanted) for part in wanted.parts])


def _name_of(reader: WeightReader, module: str) -> str | None:
    """Return the numbers' tensor, if in this format."""
    names = (module + _PACKED, module + _PLAIN_NAME)
    return next((name for name in names if reader.has(name) and reader.stored(name) == "U8"), None)


def _part(reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
    name = _name_of(reader, part.name)
    assert name is not None
    if reader.has(part.name + ".pre_quant_scale"):
        raise StartupError(f"weight {part.name}.pre_quant_scale scales the inputs of 4-bit floats; that is not served")
    skip_inputs(reader, part.name)
    shape = reader.shape(name)
    asked = part.num_rows, wanted.num_columns
    if len(shape) != 2 or any(
        said is not None and said != found for said, found in zip(asked, (shape[0], 2 * shape[1]), strict=False)
    ):
        raise StartupError(f"weight {name} has shape {list(shape)}; the config asks for a matrix {list(asked)}, two "
                           "numbers in a byte")  # fmt: skip
    num_columns = 2 * shape[1]
    scales, factor = _scales(reader, part.name, (shape[0], num_columns))
    return keep_part(
        name, num_columns, scales, num_columns // scales.shape[1], part, wanted.columns,
        lambda rows, span: reader.raw(name, rows, span), factor,
    )  # fmt: skip


def _scales(reader: WeightReader, module: str, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Read [out, groups] float32, and the factor of which e4m3 floats make them, if stored so."""
    name = module + ".weight_scale"
    shape, stored = reader.shape(name), reader.stored(name)
    if stored not in _SCALE_TYPES:
        raise StartupError(f"weight {name} is stored as {stored}; scales of 4-bit floats are floats or exponents")
    if len(shape) != 2 or shape[0] != size[0] or not shape[1] or size[1] % shape[1]:
        raise StartupError(
            f"weight {name} has shape {list(shape)}; 4-bit floats of a matrix {list(size)} ask for [{size[0]}, a "
            f"divisor of {size[1]}]"
        )
    scales = reader.raw(name)
    if stored in _EXPONENTS:
        return finite(name, powers(scales)), None
    return _of_matrix(reader, module, finite(name, scales.float()), stored)


def _of_matrix(reader: WeightReader, module: str, scales: Tensor, stored: str) -> tuple[Tensor, Tensor | None]:
    """Include the whole matrix's scale, which 8-bit scales need."""
    divisor, factor = module + ".weight_global_scale", module + ".weight_scale_2"
    for name in (divisor, factor):
        if reader.has(name):
            one = reader.raw(name).float()
            if one.shape not in ((), (1,)) or not torch.isfinite(one).all() or (name == divisor and not one.all()):
                raise StartupError(f"weight {name} must be one finite number{', not 0' if name == divisor else ''}")
            one = one.reshape(1)
            of_matrix, together = (1 / one, scales / one) if name == divisor else (one, scales * one)
            return together, of_matrix if stored == "F8_E4M3" else None
    if stored == "F8_E4M3":
        raise StartupError(f"weight {divisor} does not exist, nor {factor}; scales of 8 bits need one")
    return scales, None
