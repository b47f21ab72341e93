"""Formats in which checkpoints store matrices. The file decides, module by module, by the tensors that it has.

To add one: a class with `claims` and `read`, and a row in FORMATS.
"""

from __future__ import annotations

from typing import Protocol

from model_server.errors import StartupError
from model_server.quantization.forms import Form
from model_server.quantization.plain import PlainFormat, tensor_name
from model_server.weights.matrix import MatrixSlice
from model_server.weights.reader import WeightReader


class WeightFormat(Protocol):
    """One way to store the matrix of a module."""

    def claims(self, reader: WeightReader, module: str) -> bool:
        """Whether `module` is stored in this format."""

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        """A part of matrices that are all stored in this format. Raises StartupError for sizes that do not fit."""


FORMATS: tuple[WeightFormat, ...] = (PlainFormat(),)


def read_matrix(reader: WeightReader, wanted: MatrixSlice) -> Form:
    """A part of stored matrices, in the form that their format is read into.

    Raises StartupError for a matrix that is missing, of another size than is asked for, or in no format of FORMATS.
    """
    (found,) = {_format_of(reader, part.name) for part in wanted.parts}
    return found.read(reader, wanted)


def _format_of(reader: WeightReader, module: str) -> WeightFormat:
    for known in FORMATS:
        if known.claims(reader, module):
            return known
    name = tensor_name(reader, module)
    if reader.has(module + "_blocks"):
        raise StartupError(
            f"weight {module} is stored as MXFP4 blocks, which this version does not serve; "
            "use a checkpoint whose experts are stored in bfloat16"
        )
    raise StartupError(f"weight {name} is stored as {reader.stored(name)}, in no format that this version serves")
