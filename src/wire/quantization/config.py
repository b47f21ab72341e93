"""Where a checkpoint says how its weights are quantized: config.json first, then the files beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wire.model_files import read_optional_object

MODELOPT = "hf_quant_config.json"
OLDER = ("quantize_config.json", "quant_config.json")
"""Of AutoGPTQ and of awq's writers, before config.json had a place for it."""
FILES = (MODELOPT, *OLDER)
SKIP_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")
"""Under these names configs list modules that stay plain."""

WORDS, SCALES = ".qweight", ".scales"
"""How the names of gptq's and awq's tensors end."""

_OWN_NAMES = {
    ".q_weight": "exl2",
    ".weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".weight.quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".SCB": "bitsandbytes",
    "._weight_qdata": "torchao",
    ".biases": "MLX",
}
"""Ends of names that only one method has."""
_BLOCKS = ("quantization_config", "compression_config")
_ONLY_AWQ = ("version", "zero_point", "w_bit")
_RENAMED = {"w_bit": "bits", "q_group_size": "group_size"}


def said_of(directory: Path, fields: Mapping[str, Any], error: type[Exception]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` with `quant_method` of config.json or a file, if any."""
    found = in_config(fields)
    if found is None:
        return _in_files(directory, error)
    if found.get("quant_method") == "gptq" and gptq_layout(found) is None:
        beside = [read_optional_object(directory / name, error) for name in OLDER]
        layout = next((named for one in beside if (named := gptq_layout(one)) is not None), None)
        return found if layout is None else {**found, "checkpoint_format": layout}
    return found


def gptq_layout(said: Mapping[str, Any]) -> str | None:
    """The name of the layout of a gptq checkpoint, `gptq_v2` where zero points are stored as they are."""
    return next((name for key in ("checkpoint_format", "format") if isinstance(name := said.get(key), str)), None)


def stores_whole_zeros(said: Mapping[str, Any]) -> bool:
    """Whether a checkpoint in gptq's layout stores zero points as they are, and not one less."""
    if not str(said.get("quant_method")).endswith("auto-round"):
        return gptq_layout(said) == "gptq_v2"
    kernel = next((name for key in ("packing_format", "backend") if isinstance(name := said.get(key), str)), "")
    return kernel.startswith("auto_round") and "auto_gptq" not in kernel


def in_config(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json says. A block that only lists modules that stay plain says nothing of what is stored."""
    return next((block for block in _blocks(fields) if not set(block) <= set(SKIP_LISTS)), None)


def by_tensors(shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Any] | None:
    """Return what tensors' names say without a config: awq packs outputs, gptq inputs."""
    words = next((name for name in shapes if name.endswith(WORDS)), None)
    if words is None:
        named = (method for end, method in _OWN_NAMES.items() if any(name.endswith(end) for name in shapes))
        return next(({"quant_method": method} for method in named), None)
    scales = shapes.get(words.removesuffix(WORDS) + SCALES)
    is_awq = scales is not None and shapes[words][-1:] != scales[-1:]
    return {"quant_method": "awq" if is_awq else "gptq"}


def wants_float8_cache(directory: Path, fields: Mapping[str, Any], error: type[Exception]) -> bool:
    """Whether a model was made for a KV cache in float8 (e4m3). Parameters and errors: as of `said_of`."""
    blocks = [*_blocks(fields), _in_modelopt(directory, error)]
    schemes = [scheme for block in blocks if isinstance(scheme := block.get("kv_cache_scheme"), Mapping)]
    if any(scheme.get("num_bits") == 8 and scheme.get("type") == "float" for scheme in schemes):
        return True
    return any(block.get("kv_cache_quant_algo") == "FP8" for block in blocks)


def wants_float4_inputs(said: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of weights that were made for activations of 4-bit floats."""
    groups = said.get("config_groups")
    if isinstance(groups, Mapping):
        given = [group.get("input_activations") for group in groups.values() if isinstance(group, Mapping)]
        return any(isinstance(inputs, Mapping) and inputs.get("num_bits") == 4 for inputs in given)
    return said.get("quant_method") == "modelopt" and said.get("quant_algo") == "NVFP4"


def skipped(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of modules that config.json wants to stay plain when weights are quantized on load."""
    text = fields.get("text_config")
    places = (fields, text if isinstance(text, Mapping) else {}, *_blocks(fields))
    lists = (place.get(name) for place in places for name in SKIP_LISTS)
    return tuple(name for found in lists if isinstance(found, list) for name in found if isinstance(name, str) and name)


def is_skipped(module: str, names: tuple[str, ...]) -> bool:
    """Whether `names` has `module` or one around it, in whole parts."""
    return any(f".{name}." in f".{module}." for name in names)


def _blocks(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for place in (fields, fields.get("text_config")):
        if isinstance(place, Mapping):
            blocks = (place.get(name) for name in _BLOCKS)
            yield from (block for block in blocks if isinstance(block, Mapping) and block)


def _in_files(directory: Path, error: type[Exception]) -> Mapping[str, Any] | None:
    if modelopt := _in_modelopt(directory, error):
        return {**modelopt, "quant_method": "modelopt"}
    for name in OLDER:
        found = read_optional_object(directory / name, error)
        said = {_RENAMED.get(key, key): value for key, value in found.items()}
        if "bits" in said:
            is_awq = any(key in found for key in _ONLY_AWQ)
            return {"quant_method": "awq" if is_awq else "gptq", **said}
    return None


def _in_modelopt(directory: Path, error: type[Exception]) -> Mapping[str, Any]:
    block = read_optional_object(directory / MODELOPT, error).get("quantization")
    return block if isinstance(block, Mapping) else {}
