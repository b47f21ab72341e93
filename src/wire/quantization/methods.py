"""Methods of quantizing weights: which are served, and what `--quantize` makes of a checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wire.quantization.config import gptq_layout
from wire.quantization.gguf import without_later_parts

Quantize = Literal[
    "awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4",
    "bitsandbytes-fp4", "fp8",
]  # fmt: skip
"""Words of `--quantize`: TGI's."""
STORED = (
    "gptq", "awq", "auto-round", "intel/auto-round", "marlin", "exl2", "mxfp4", "compressed-tensors", "fbgemm_fp8",
    "fp8", "modelopt FP8", "modelopt NVFP4", "modelopt MXFP4", "modelopt MXFP8", "bitsandbytes", "torchao", "gguf",
)  # fmt: skip
"""Methods, as `method_of` names them, of checkpoints that are served. auto-round packs as gptq or awq do."""
ON_LOAD = ("fp8", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4")
"""Words of `--quantize` that quantize plain weights while they are loaded."""
FOUR_BITS = ("bitsandbytes-nf4", "bitsandbytes-fp4")
"""Those of ON_LOAD that leave 4 bits of each number, the others leave 8."""
NAMES_STORED = ("gptq", "awq", "exl2", "marlin", "compressed-tensors")
"""Words of `--quantize` that name a stored format."""

_SAME = {
    "fp8": ("fp8", "fbgemm_fp8", "modelopt FP8", "modelopt MXFP8"),
    "marlin": ("gptq", "marlin"),
    "exl2": ("exl2",),
    "gptq": ("gptq", "awq", "auto-round", "intel/auto-round"),
    "awq": ("awq", "auto-round", "intel/auto-round"),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
    "bitsandbytes-nf4": ("bitsandbytes",),
    "bitsandbytes-fp4": ("bitsandbytes",),
}
# Formats of compressed-tensors that are read, and the states in which its weights are whole.
_COMPRESSED = (
    "dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
_FINISHED = (None, "compressed", "frozen")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# Algorithms of modelopt that differ in what becomes of activations, which keep 16 bits here.
_SAME_WEIGHTS = {"W4A16_NVFP4": "NVFP4", "W4A8_MXFP4_FP8": "MXFP4", "mxfp4": "MXFP4"}
_GPTQ_BITS, _GPTQ_FORMATS = (2, 3, 4, 8), (None, "", "gptq", "gptq_v2", "marlin")
_TORCHAO = (
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig",
    "int8_weight_only", "int8_dynamic_activation_int8_weight", "float8_weight_only",
    "float8_dynamic_activation_float8_weight",
)  # fmt: skip
_TORCHAO_BY_MODULE = ("FqnToConfig", "ModuleFqnToConfig")
# Data types of auto-round whose scales or numbers are not those that their layout suggests.
_OTHER_TYPES = ("mx_int", "nvfp4_v2", "nv_fp4_v2")
_ROTATIONS = ("rotation", "rotation_config")
"""Of gptqmodel and auto-round: inputs of some products are rotated while the model runs."""
FP8_SCALES = (None, "inverse")
"""`weight_scale_semantics`: gptqmodel's scales divide, all others multiply."""
_AWQ_BITS, _OTHER_AWQ = (4,), ("gemv", "gemv_fast", "marlin")


@dataclass(frozen=True, slots=True)
class Choice:
    """How weights come into memory."""

    # Of checkpoint or flag; None: plain.
    method: str | None = None
    on_load: bool = False
    warning: str | None = None


def choose(flag: str | None, said: Mapping[str, Any] | None, model: str, error: type[Exception]) -> Choice:
    """Choose how weights come into memory.

    Args:
        flag: `--quantize`.
        said: `quantization_config`; None: plain.
        model: In messages.
        error: Raised, one line, for what is not served.
    """
    if said is None:
        return _of_plain(flag, model, error)
    method = method_of(said)
    if method == "unknown" and {"bits", "group_size"} <= set(said):
        raise error(
            f"{model} does not say by which method it is quantized; if it was made for MLX, which is not served, give "
            "the model that it was made from, with --quantize if it is too large"
        )
    if method not in STORED:
        raise error(f"{model} is quantized with {method}, which is not served; served are {', '.join(STORED)}")
    status = said.get("quantization_status")
    if status not in _FINISHED:
        raise error(f"the quantization of {model} was not finished (status {status})")
    if flag is not None and method == "gguf":  # no word of the flag names it
        raise error(f"`--quantize {flag}`: {model} is a GGUF file, which is served as it is stored; leave it out")
    if flag is None or flag == _word_of(method, said) or (flag not in FOUR_BITS and method in _SAME.get(flag, ())):
        return Choice(method)
    if flag not in NAMES_STORED and method not in _SAME.get(flag, ()):
        raise error(
            f"`--quantize {flag}` quantizes plain weights on load, but {model} is stored as {method}; leave it out"
        )
    return Choice(
        method, warning=f"`--quantize {flag}` names another format than that of {model}: {method}, which is served"
    )


def _word_of(method: str, said: Mapping[str, Any]) -> str:
    """`method`, where `--quantize` has several words for it the one that is meant."""
    if method == "bitsandbytes" and said.get("load_in_4bit"):
        return f"bitsandbytes-{said.get('bnb_4bit_quant_type', 'fp4')}"
    return method


def _of_plain(flag: str | None, model: str, error: type[Exception]) -> Choice:
    if flag is None:
        return Choice()
    if flag in NAMES_STORED:
        raise error(
            f"`--quantize {flag}` names a stored format, but {model} holds plain weights; leave it out, or quantize on "
            "load with fp8, eetq or bitsandbytes-nf4"
        )
    return Choice(flag, on_load=True)


def only_gguf(names: Collection[str]) -> list[str]:
    """Return the GGUF files, of several parts the first, where there are no other weights, sorted."""
    if any(name.endswith(_OTHER_WEIGHTS) for name in names):
        return []
    return without_later_parts(sorted(name for name in names if name.endswith(".gguf")))


def refuse_gguf(names: Collection[str], model: str, error: type[Exception]) -> None:
    """Refuses a folder or repository whose only weights are GGUF files. names: of its files. Raises `error`."""
    if found := only_gguf(names):
        raise error(
            f"{model} holds GGUF files and no other weights: choose one, as `--gguf-file {found[0]}` (found: "
            f"{', '.join(found[:8])})"
        )


def method_of(said: Mapping[str, Any]) -> str:
    """Return `quant_method`, and which way of storing, if some are not served."""
    method = str(said.get("quant_method") or "unknown")
    if any(said.get(name) for name in _ROTATIONS):
        return f"{method} with rotations"
    if method.startswith("modelopt"):
        return f"modelopt {_modelopt(said)}"
    variant = _VARIANTS.get(method.removeprefix("intel/"))
    other = None if variant is None else variant(said)
    return method if other is None else f"{method} {other}"


def _modelopt(said: Mapping[str, Any]) -> str | None:
    """Return its way of storing, an unserved one first."""
    inner = said.get("quantization")
    places = (said, inner if isinstance(inner, Mapping) else {})
    named = next((str(name) for place in places if (name := place.get("quant_algo"))), None)
    if named != "MIXED_PRECISION":
        return None if named is None else _SAME_WEIGHTS.get(named, named)
    layers = next((found for place in places if isinstance(found := place.get("quantized_layers"), Mapping)), {})
    ways = [_modelopt(layer) for layer in layers.values() if isinstance(layer, Mapping)]
    others = [way for way in ways if f"modelopt {way}" not in STORED]
    if not ways or others:
        return f"MIXED_PRECISION{''.join(f' with {way}' for way in others[:1])}"
    return ways[0]


def _compressed(said: Mapping[str, Any]) -> str | None:
    named, sparsity = said.get("format"), said.get("sparsity_config")
    if named is not None and named not in _COMPRESSED:
        return str(named)
    if said.get("transform_config"):
        return "with transforms"
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return str(sparsity["format"])
    return None


def _gptq(said: Mapping[str, Any]) -> str | None:
    named = gptq_layout(said)
    return f"in {named} format" if named not in _GPTQ_FORMATS else _other_bits(said, _GPTQ_BITS)


def _awq(said: Mapping[str, Any]) -> str | None:
    version = str(said.get("version", "gemm")).lower()
    return f"of version {version}" if version in _OTHER_AWQ else _other_bits(said, _AWQ_BITS)


def _torchao(said: Mapping[str, Any]) -> str | None:
    """Return `quant_type`'s class, one per module, or older word."""
    return next((kind for kind in _torchao_kinds(said.get("quant_type")) if kind not in _TORCHAO), None)


def _torchao_kinds(said: object) -> Iterator[str]:
    if not isinstance(said, Mapping):
        yield from () if said is None else (str(said),)
    elif "_type" not in said:
        for one in said.values():
            yield from _torchao_kinds(one)
    elif said["_type"] in _TORCHAO_BY_MODULE and isinstance(said.get("_data"), Mapping):
        for modules in said["_data"].values():
            for one in modules.values() if isinstance(modules, Mapping) else ():
                if one is not None:
                    yield from _torchao_kinds(one)
    else:
        yield str(said["_type"])


def _auto_round(said: Mapping[str, Any]) -> str | None:
    kind = said.get("data_type")
    if isinstance(kind, str) and kind.startswith(_OTHER_TYPES):
        return f"of data type {kind}"
    return _other_bits(said, _GPTQ_BITS)


def _fp8(said: Mapping[str, Any]) -> str | None:
    scales = said.get("weight_scale_semantics")
    return None if scales in FP8_SCALES else f"with {scales} scales"


def _gguf(said: Mapping[str, Any]) -> str | None:
    """Return gptqmodel's layers: they are not a GGUF file."""
    return "inside other files" if gptq_layout(said) else None


def _other_bits(said: Mapping[str, Any], served: tuple[int, ...]) -> str | None:
    bits = said.get("bits")
    return f"of {bits} bits" if bits is not None and bits not in served else None


_VARIANTS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "torchao": _torchao,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "gguf": _gguf,
}
"""Method -> what is not served of it; None: all of it."""
