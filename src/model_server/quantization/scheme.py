"""How weights come into memory: by `--quantize`, config and tensors; `wire.quantization` says what is served."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.described import said_of_weights
from model_server.quantization.formats import PLAIN, WeightFormat, format_of, formats_of, holds, read_matrix
from model_server.quantization.forms import Form, Stacked, float8, stacked, table
from model_server.quantization.forms.codes import Codes, cat
from model_server.quantization.forms.float8 import Fp8
from model_server.quantization.forms.table import TableCodes
from model_server.quantization.onload import PIECE_BYTES, QUANTIZERS, Quantizer, read_quantized
from model_server.quantization.plain import PlainFormat
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import WeightReader
from wire.quantization.config import is_skipped, skipped, wants_float4_inputs
from wire.quantization.methods import choose
from wire.text.counting import counted

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Scheme:
    """The quantization of one model."""

    # The checkpoint's or the flag's; None: plain.
    method: str | None = None
    formats: tuple[WeightFormat, ...] = PLAIN
    # For plain matrices on load, except `skipped` modules.
    quantize: Quantizer | None = None
    skipped: tuple[str, ...] = ()
    warning: str | None = None
    # Made for activations of 4-bit floats.
    float4_inputs: bool = False
    _kinds: Counter[str] = field(default_factory=Counter)
    _plain: set[str] = field(default_factory=set)

    def read(self, reader: WeightReader, wanted: MatrixSlice, *, as_stored: bool = False) -> Form:
        """Read a part of stored matrices; `as_stored`: nothing quantized on load."""
        forms = []
        for quantize, run in groupby(wanted.parts, key=lambda part: None if as_stored else self._on_load(reader, part)):
            parts = tuple(run)
            kept = wanted.of(parts)
            form = (
                read_matrix(reader, kept, self.formats)
                if quantize is None
                else merged(read_quantized(reader, kept, quantize))
            )
            self._count(reader, parts, form, is_quantized=quantize is not None)
            forms.append(form)
        return stacked(forms)

    def quantized(self, weight: Tensor, name: str) -> Form | None:
        """Quantize a plain matrix [out, in] as if loaded; None: it stays."""
        if self.quantize is None or is_skipped(name, self.skipped):
            self._plain.add(name)
            return None
        step = max(PIECE_BYTES // max(weight[:1].nbytes, 1), 1)
        columns = (0, weight.shape[1])
        form = merged([self.quantize(rows, columns, name) for rows in torch.split(weight, step)])
        self._kinds[form.kind or ""] += 1
        return form

    def stores(self, reader: WeightReader, module: str) -> bool:
        """Whether the checkpoint has a quantized matrix for `module`."""
        found = next((known for known in self.formats if known.claims(reader, module)), None)
        return found is not None and not isinstance(found, PlainFormat)

    def holds(self, reader: WeightReader, module: str) -> bool:
        return holds(reader, module, self.formats)

    def report(self, dtype: torch.dtype) -> None:
        """Log one line on what was read."""
        if self.method is None:
            return
        kinds = "; ".join(kind for kind, _ in self._kinds.most_common())
        how = f"{self.method} on load" if self.quantize is not None else self.method
        activations = str(dtype).removeprefix("torch.")
        num_plain = len(self._plain)
        plain = f"{counted(num_plain, 'module')} plain"
        kept = ", though the checkpoint is made for 4 bits" if self.float4_inputs else ""
        logger.info("Weights: %s, %s; %s; activations in %s%s", how, kinds or "none found", plain, activations, kept)

    def _on_load(self, reader: WeightReader, part: Part) -> Quantizer | None:
        """Return what quantizes a matrix, if anything."""
        if self.quantize is None or is_skipped(part.name, self.skipped) or not self._is_plain(reader, part):
            return None
        return self.quantize

    def _is_plain(self, reader: WeightReader, part: Part) -> bool:
        return isinstance(format_of(reader, part.name, self.formats), PlainFormat)

    def _count(self, reader: WeightReader, parts: tuple[Part, ...], form: Form, *, is_quantized: bool) -> None:
        if not is_quantized:
            self._plain.update(part.name for part in parts if self._is_plain(reader, part))
        for piece in form.forms if isinstance(form, Stacked) else (form,):
            if piece.kind is not None:
                self._kinds[piece.kind] += 1


def merged(forms: list[Form]) -> Form:
    """Join rows of one kind."""
    codes = [form for form in forms if isinstance(form, Codes)]
    floats = [form for form in forms if isinstance(form, Fp8)]
    tables = [form for form in forms if isinstance(form, TableCodes)]
    if len(codes) == len(forms):
        return cat(codes)
    if len(tables) == len(forms):
        return table.cat(tables)
    return float8.cat(floats) if len(floats) == len(forms) else stacked(forms)


def resolve(checkpoint: Checkpoint, flag: str | None = None, model: str | None = None) -> Scheme:
    """Choose the scheme by `--quantize` and the checkpoint."""
    name = str(checkpoint.directory) if model is None else model
    said = said_of_weights(checkpoint)
    choice = choose(flag, said, name, StartupError)
    return Scheme(
        choice.method,
        formats_of(said or {}),
        QUANTIZERS[choice.method or ""] if choice.on_load else None,
        skipped=skipped(checkpoint.fields),
        warning=choice.warning,
        float4_inputs=said is not None and wants_float4_inputs(said),
    )
