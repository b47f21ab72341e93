"""Formats of stored matrices, decided module by module by the tensors.

To add one: a class with `claims` and `read`, and a row in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from model_server.errors import StartupError
from model_server.quantization.formats.awq import AwqFormat
from model_server.quantization.formats.bitsandbytes import BitsAndBytesFormat
from model_server.quantization.formats.compressed import CompressedFormat
from model_server.quantization.formats.exl2 import Exl2Format
from model_server.quantization.formats.float4 import Float4Format
from model_server.quantization.formats.fp8 import Fp8Format
from model_server.quantization.formats.gguf import GgufFormat
from model_server.quantization.formats.gptq import GptqFormat
from model_server.quantization.formats.marlin import MarlinFormat
from model_server.quantization.formats.mxfp4 import Mxfp4Format
from model_server.quantization.formats.torchao import TorchaoFormat
from model_server.quantization.forms import Form, stacked
from model_server.quantization.plain import PlainFormat, tensor_name
from model_server.weights.matrix import MatrixSlice
from model_server.weights.reader import WeightReader


class WeightFormat(Protocol):
    """One way to store a module's matrix."""

    def claims(self, reader: WeightReader, module: str) -> bool:
        """Whether `module` is stored in this format."""

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        """Read a part of matrices in this format."""


# Made from the `quantization_config`; the first that claims a module reads it.
FORMATS: tuple[Callable[[Mapping[str, Any]], WeightFormat], ...] = (
    BitsAndBytesFormat,  # before plain: its bytes may be stored as floating point numbers
    lambda config: PlainFormat(),
    AwqFormat,
    GptqFormat,
    MarlinFormat,
    Exl2Format,
    Mxfp4Format,
    Float4Format,
    CompressedFormat,
    Fp8Format,
    TorchaoFormat,
    GgufFormat,
)


def formats_of(config: Mapping[str, Any]) -> tuple[WeightFormat, ...]:
    """Return the formats of a `quantization_config`, if any."""
    return tuple(make(config) for make in FORMATS)


PLAIN = formats_of({})


def read_matrix(reader: WeightReader, wanted: MatrixSlice, formats: Sequence[WeightFormat] = PLAIN) -> Form:
    """Read a part of stored matrices, in their format's form.

    Raises:
        StartupError: It is missing, of another size, or in no known format.
    """
    runs = groupby(wanted.parts, key=lambda part: format_of(reader, part.name, formats))
    return stacked(found.read(reader, wanted.of(tuple(parts))) for found, parts in runs)


def holds(reader: WeightReader, module: str, formats: Sequence[WeightFormat] = PLAIN) -> bool:
    """Whether the checkpoint has a matrix for `module`."""
    return any(known.claims(reader, module) for known in formats)


def format_of(reader: WeightReader, module: str, formats: Sequence[WeightFormat] = PLAIN) -> WeightFormat:
    """The format of one module. Raises StartupError."""
    for known in formats:
        if known.claims(reader, module):
            return known
    name = tensor_name(reader, module)
    raise StartupError(f"weight {name} is stored as {reader.stored(name)}, in no format that this version serves")
