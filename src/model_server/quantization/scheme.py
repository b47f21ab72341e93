"""How the weights of a checkpoint come into memory: by `--quantize`, by what its config says, and by what it holds.

The one place that refuses methods that are not served. What a module is stored in, its tensors say (`formats`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model_server.errors import StartupError
from model_server.quantization import float8
from model_server.quantization.codes import Codes, cat
from model_server.quantization.float8 import Fp8
from model_server.quantization.formats import PLAIN, WeightFormat, format_of, formats_of, holds, read_matrix
from model_server.quantization.forms import Form, stacked
from model_server.quantization.methods import FINISHED, method_of
from model_server.quantization.onload import QUANTIZERS, Quantizer, read_quantized
from model_server.quantization.plain import PlainFormat
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.matrix import MatrixSlice
from model_server.weights.reader import WeightReader
from wire.model_files import read_object

logger = logging.getLogger(__name__)

# `quant_method` of checkpoints that are served. auto-round packs as gptq or awq do.
STORED = (
    "gptq", "awq", "auto-round", "intel/auto-round", "compressed-tensors", "fbgemm_fp8", "fp8", "modelopt FP8",
)  # fmt: skip
# Words of `--quantize` that name a stored format, and that quantize plain weights.
NAMES_STORED = ("gptq", "awq", "exl2", "marlin", "compressed-tensors")
_SAME = {
    "fp8": ("fp8", "fbgemm_fp8", "modelopt FP8"),
    "marlin": ("gptq",),
    "gptq": ("awq", "auto-round", "intel/auto-round"),
}
_FILES = ("quantize_config.json", "quant_config.json")


@dataclass(slots=True)
class Scheme:
    """method: as the checkpoint or the flag names it; None: the weights are plain and stay so.

    `read` counts what it reads; `report` says it.
    """

    method: str | None = None
    formats: tuple[WeightFormat, ...] = PLAIN
    quantize: Quantizer | None = None
    _kinds: Counter[str] = field(default_factory=Counter)
    _num_plain: int = 0

    def read(self, reader: WeightReader, wanted: MatrixSlice, *, as_stored: bool = False) -> Form:
        """A part of stored matrices. as_stored: no matrix that is quantized on load. Raises StartupError."""
        if self.quantize is None or as_stored or not self._are_plain(reader, wanted):
            form = read_matrix(reader, wanted, self.formats)
        else:
            form = merged(read_quantized(reader, wanted, self.quantize))
        if form.kind is None:
            self._num_plain += 1
        else:
            self._kinds[form.kind] += 1
        return form

    def holds(self, reader: WeightReader, module: str) -> bool:
        """Whether the checkpoint has a matrix for `module`."""
        return holds(reader, module, self.formats)

    def report(self) -> None:
        """One line for the model."""
        if self.method is None:
            return
        kinds = "; ".join(kind for kind, _ in self._kinds.most_common())
        how = f"{self.method} on load" if self.quantize is not None else self.method
        logger.info("Weights: %s, %s; %d matrices plain", how, kinds or "none found", self._num_plain)

    def _are_plain(self, reader: WeightReader, wanted: MatrixSlice) -> bool:
        return all(isinstance(format_of(reader, part.name, self.formats), PlainFormat) for part in wanted.parts)


def merged(forms: list[Form]) -> Form:
    """Pieces of rows as one form, where they are of one kind."""
    codes = [form for form in forms if isinstance(form, Codes)]
    floats = [form for form in forms if isinstance(form, Fp8)]
    if len(codes) == len(forms):
        return cat(codes)
    return float8.cat(floats) if len(floats) == len(forms) else stacked(forms)


def resolve(checkpoint: Checkpoint, flag: str | None = None, model: str | None = None) -> Scheme:
    """flag: `--quantize`. model: what messages call the checkpoint. Raises StartupError for what is not served."""
    name = str(checkpoint.directory) if model is None else model
    config = _config(checkpoint)
    if config is None:
        return _on_load(flag, name)
    method = method_of(config)
    if method not in STORED:
        raise StartupError(f"{name} is quantized with {method}, which is not served; served are {', '.join(STORED)}")
    if config.get("quantization_status") not in FINISHED:
        raise StartupError(f"the quantization of {name} was not finished (status {config['quantization_status']})")
    if flag is not None and flag not in NAMES_STORED and method not in _SAME.get(flag, ()):
        raise StartupError(
            f"`--quantize {flag}` quantizes plain weights on load, but {name} is stored as {method}; leave it out"
        )
    if flag not in (None, method) and method not in _SAME.get(flag or "", ()):
        logger.warning("`--quantize %s` names another format than that of %s: %s, which is served", flag, name, method)
    return Scheme(method, formats_of(config or {}))


def _on_load(flag: str | None, name: str) -> Scheme:
    if flag is None:
        return Scheme()
    if flag in NAMES_STORED:
        raise StartupError(
            f"`--quantize {flag}` names a stored format, but {name} holds plain weights; leave it out, or quantize on "
            "load with fp8, eetq or bitsandbytes-nf4"
        )
    if flag not in QUANTIZERS:
        raise StartupError(f"`--quantize {flag}` is not served; of plain weights served are {', '.join(QUANTIZERS)}")
    return Scheme(flag, quantize=QUANTIZERS[flag])


def _config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """What is said of the quantization, the best source first; None: the weights are plain."""
    text = checkpoint.fields.get("text_config")
    for fields in (checkpoint.fields, text if isinstance(text, Mapping) else {}):
        block = fields.get("quantization_config") or fields.get("compression_config")
        if isinstance(block, Mapping):
            return block
    modelopt = checkpoint.directory / "hf_quant_config.json"
    if modelopt.exists():
        block = read_object(modelopt, StartupError).get("quantization")
        return {**(block if isinstance(block, Mapping) else {}), "quant_method": "modelopt"}
    return _by_tensors(checkpoint)


def _by_tensors(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    names = {name: stored for header in checkpoint.headers.values() for name, stored in header.tensors.items()}
    words = next((name for name in names if name.endswith(".qweight")), None)
    if words is None:
        return None
    scales = names.get(words.removesuffix("qweight") + "scales")
    is_awq = scales is not None and names[words].shape[-1:] != scales.shape[-1:]
    found = next((path for file in _FILES if (path := checkpoint.directory / file).exists()), None)
    said = {} if found is None else read_object(found, StartupError)
    renamed = {"bits": said.get("w_bit"), "group_size": said.get("q_group_size")}
    known = {key: value for key, value in renamed.items() if value is not None}
    return {"quant_method": "awq" if is_awq else "gptq", **known, **said}
