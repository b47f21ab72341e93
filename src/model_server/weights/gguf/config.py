"""config.json from GGUF metadata, under transformers' names."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.architecture import Architecture
from model_server.weights.gguf.architectures import architecture_of
from model_server.weights.gguf.header import BLOCKS, FLOATS, GgufHeader
from model_server.weights.gguf.names import num_layers_of
from model_server.weights.header import stored_type
from wire.model_files import open_regular

_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NUMBERS = (
    "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon", "rope_theta",
    "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier", "embedding_multiplier",
    "residual_multiplier", "logits_scaling", "logit_scale", "routed_scaling_factor",
)  # fmt: skip
"""Fields that need not be whole."""
_FLAGS = ("norm_topk_prob", "use_parallel_residual")
_COUNTS_FROM_0 = ("first_k_dense_replace", "num_dense_layers")
# Which layers may have their own, or 0 for none.
_BY_LAYER = ("num_key_value_heads", "intermediate_size")
_LARGEST = 2**31
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_REQUIRED = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_OF_ATTENTION = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "sliding_window",
)  # fmt: skip
_GEMMA_ACTIVATION = "gelu_pytorch_tanh"
# The layers of the models whose scores are divided by the root of the width of a head as the embedding has it.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Llama 3's own parameters; files hold only the factors that they lead to.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SAMPLING = {
    "general.sampling.temp": "temperature", "general.sampling.top_k": "top_k", "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p", "general.sampling.penalty_repeat": "repetition_penalty",
}  # fmt: skip
# `general.file_type` of llama.cpp, for files whose weights have several types.
_SCALES = (
    "rope.dimension_count", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
    "rope.freq_base_swa", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)  # fmt: skip
_MIXTURES = {
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 21: "Q2_K_S", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M",
}  # fmt: skip
# Bits of a number of the types that take more in memory than in the file: codes of at least four, scales of 32 where
# codes are levels.
_KEPT_BITS = {
    "Q2_K": 5.25, "Q3_K": 4.75, "TQ1_0": 4.125, "TQ2_0": 4.125, "IQ4_NL": 5, "IQ4_XS": 5, "MXFP4": 5, "IQ3_S": 5,
    "IQ3_XXS": 5, "IQ2_S": 6, "IQ2_XS": 6, "IQ2_XXS": 5, "IQ1_S": 5, "IQ1_M": 6,
}  # fmt: skip
# Factors on the lengths of rotated heads.
_STRETCHES = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
# Of other architectures, or of models that these architectures may have been made from -> what changes nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
_LLAMA3_ORIGINALS = (8192, 4096, 2048, 16384, 32768)


def config_of(header: GgufHeader, path: Path) -> dict[str, Any]:
    """Return the fields, if metadata is complete and served."""
    architecture = architecture_of(header.metadata, path)
    name = header.metadata["general.architecture"]
    given = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items()}
    known = {ours: key for ours, key in _FIELDS.items() if architecture.attends or ours not in _OF_ATTENTION}
    names = {**known, **dict([architecture.epsilon]), **architecture.fields, **architecture.optional}
    fields: dict[str, Any] = {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    if "expert_feed_forward_length" in given:
        fields.setdefault("intermediate_size", given["expert_feed_forward_length"])
    for ours in _BY_LAYER if architecture.derived is not None else ():
        if isinstance(fields.get(ours), list):
            fields[ours] = _common(fields[ours], f"{path}: `{name}.{names[ours]}`")
    for ours, value in fields.items():
        # A window of 0 is none: files of Phi say so.
        if not (ours in ("sliding_window", *_COUNTS_FROM_0) and value == 0) and ours not in _FLAGS:
            _check(value, ours in _NUMBERS, f"{path}: `{name}.{names[ours]}`")
    for ours in (*_REQUIRED, architecture.epsilon[0], *architecture.fields):
        if ours in names and ours not in fields and ours not in _FLAGS:
            raise StartupError(f"{path} lacks the metadata `{name}.{names[ours]}`")
    fields["num_hidden_layers"] = num_layers_of(header.metadata)
    count = fields["num_hidden_layers"]
    if type(count) is int and count > len(header.tensors):  # before lists of that length are made
        raise StartupError(f"{path}: `{name}.block_count` asks for {count} layers, and there are fewer tensors")
    fields |= {ours: _presence(tensor, header, count) for ours, tensor in architecture.present.items()}
    fields |= architecture.fixed
    if architecture.derived is not None:
        fields |= _derived(architecture, given, fields, path)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{path} lacks the tensor token_embd.weight")
    fields.setdefault("model_type", architecture.model_type)
    fields |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in header.tensors}
    if architecture.attends:
        fields.setdefault("rope_theta", 10000.0)
        fields.setdefault("head_dim", fields["hidden_size"] // max(fields["num_attention_heads"], 1))
    if architecture.model_type.startswith("gemma"):
        fields |= _gemma(name, fields, given)
    if name.startswith("qwen"):
        fields.pop("sliding_window", None)
    if name == "phi3":
        fields.setdefault("sliding_window", None)
    _check_neutral(name, architecture, fields, given, path)
    if architecture.attends:
        fields |= _rotation(given, fields, header, path)
    fields |= _special(header.metadata, path)
    # For the launcher, which sees no more of the file: the type of the KV cache follows from it.
    if (dtype := _DTYPES.get(stored_type(header.tensors.values()) or "")) is not None:
        fields["dtype"] = dtype
    if any(stored.dtype not in FLOATS for stored in header.tensors.values()):
        fields["quantization_config"] = {
            "quant_method": "gguf",
            "file_type": _file_type(header),
            "growth": round(_growth(header), 3),
        }
    return fields


def _presence(tensor: str, header: GgufHeader, num_layers: int) -> bool | list[bool]:
    """Say whether the file has a tensor; `{}` in its name: of each layer."""
    if "{}" not in tensor:
        return tensor in header.tensors
    return [tensor.format(index) in header.tensors for index in range(num_layers)]


def _check(value: Any, is_number: bool, what: str) -> None:
    """Refuse what is no positive (whole) number."""
    is_right = type(value) in ((int, float) if is_number else (int,)) and 0 < value < _LARGEST
    if not is_right:
        raise StartupError(
            f"{what} is {value!r:.80}; a positive {'number' if is_number else 'whole number'} is expected"
        )


def _common(values: Sequence[Any], what: str) -> Any:
    """Return the number that layers have which have one."""
    found = {value for value in values if value}
    if len(found) > 1:
        raise StartupError(f"{what} differs from layer to layer, which is not served")
    return found.pop() if found else None


def _derived(
    architecture: Architecture, given: Mapping[str, Any], fields: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    assert architecture.derived is not None
    for key in [key for key in given if key.startswith(("ssm.", "shortconv."))]:
        if type(given[key]) is int:
            _check(given[key], False, f"{path}: `{key}`")
    try:
        return architecture.derived(given, fields)
    except KeyError as error:
        name = given["general.architecture"]
        raise StartupError(f"{path} lacks the metadata `{name}.{error.args[0]}`") from None


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: sampling, and ids that end a text or turn."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens")
    # llama.cpp ends at these, whatever else a file names.
    turns = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        known = dict(zip(tokens, range(min(len(tokens), len(kinds))), strict=False))
        ids += [known[turn] for turn in turns if turn in known and kinds[known[turn]] == 3]
    ends = list(dict.fromkeys(one for one in ids if isinstance(one, int)))
    found: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    found |= {name: _shortest(metadata[key]) for key, name in _SAMPLING.items() if key in metadata}
    return found if bos is None else {"bos_token_id": bos, **found}


def _shortest(value: Any) -> Any:
    """Return a 32-bit number as its author wrote it, such as 0.6."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _file_type(header: GgufHeader) -> str:
    """Return the file's usual name, as `Q4_K_M`."""
    sizes = Counter[str]()
    for stored in header.tensors.values():
        sizes[stored.dtype] += math.prod(stored.shape)
    commonest = max(sizes, key=lambda dtype: sizes[dtype])
    said = header.metadata.get("general.file_type")
    mixture = _MIXTURES.get(said, "") if isinstance(said, int) else ""
    # Of a small model most numbers are in the embedding, of odd widths in the type that stands in for the mixture's.
    return mixture if mixture.rpartition("_")[0] in sizes else commonest


def _growth(header: GgufHeader) -> float:
    """Return the bytes of blocks in memory, on CPUs, for each byte of them in the file."""
    stored = kept = 0.0
    for tensor in header.tensors.values():
        if tensor.dtype not in FLOATS:
            length, size = BLOCKS[tensor.dtype]
            bits = 8 * size / length
            stored += math.prod(tensor.shape) * bits
            kept += math.prod(tensor.shape) * _KEPT_BITS.get(tensor.dtype, bits)
    return kept / stored


def _special(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, theirs in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        key = f"tokenizer.ggml.{theirs}_token_id"
        value = metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < _LARGEST):
            raise StartupError(f"{path}: `{key}` is {value!r:.80}; the id of a token is expected")
        found |= {} if value is None else {ours: value}
    return found


def _gemma(name: str, fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"hidden_act": _GEMMA_ACTIVATION, "hidden_activation": _GEMMA_ACTIVATION}
    if name != "gemma":
        by_width = fields["num_hidden_layers"] == _SCALED_BY_WIDTH[name]
        width = fields["hidden_size"] // fields["num_attention_heads"]
        found["query_pre_attn_scalar"] = width if by_width else fields["head_dim"]
    if name == "gemma3":
        pattern = given.get("attention.sliding_window_pattern")
        found["rope_local_base_freq"] = given.get("rope.freq_base_swa", 10000.0)
        found["sliding_window_pattern"] = pattern if isinstance(pattern, int) else 6
    return found


def _rotation(given: Mapping[str, Any], fields: Mapping[str, Any], header: GgufHeader, path: Path) -> dict[str, Any]:
    """Return the scaling of rotations, if transformers' parameters can say it."""
    found: dict[str, Any] = {}
    for name in _SCALES:
        if name in given:
            _check(given[name], True, f"{path}: `{name}`")
    rotated = given.get("rope.dimension_count", fields["head_dim"])
    if rotated != fields["head_dim"]:
        found["partial_rotary_factor"] = rotated / fields["head_dim"]
    kind = given.get("rope.scaling.type", "linear")  # llama.cpp's default
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 1.0))
    original = given.get("rope.scaling.original_context_length")
    stretch = math.prod(float(given.get(key, 1.0)) for key in _STRETCHES)
    if "rope_freqs.weight" in header.tensors:
        found["rope_scaling"] = _llama3(_floats(header, "rope_freqs.weight", path), fields, path)
    elif "rope_factors_long.weight" in header.tensors:
        short, long = (_floats(header, f"rope_factors_{length}.weight", path) for length in ("short", "long"))
        found["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if stretch != 1.0:
            found["rope_scaling"]["attention_factor"] = stretch
        found["original_max_position_embeddings"] = original
    elif kind == "linear" and factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found["rope_scaling"] = {"rope_type": "yarn", "factor": factor, **_yarn(given)}
        if stretch != 1.0:
            found["rope_scaling"]["attention_factor"] = stretch * (1 + 0.1 * math.log(max(factor, 1.0)))
        if original is not None:
            found["rope_scaling"]["original_max_position_embeddings"] = original
    elif kind not in ("none", "linear"):
        raise StartupError(f"{path} scales its rotations by {kind!r:.80}, which is not served from GGUF files")
    if stretch != 1.0 and found.get("rope_scaling", {}).get("rope_type") not in ("longrope", "yarn"):
        raise StartupError(f"{path} has the metadata `{_STRETCHES[0]}` for rotations that have no such factor")
    return found


def _yarn(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN's bounds, if given."""
    keys = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    return {name: float(given[key]) for name, key in keys.items() if key in given}


def _check_neutral(
    name: str, architecture: Architecture, fields: Mapping[str, Any], given: Mapping[str, Any], path: Path
) -> None:
    """Refuse unread metadata that changes the model."""
    neutral = {**_NEUTRAL, **architecture.expected}
    if "attention.value_length_mla" not in architecture.fields.values():
        neutral["attention.value_length"] = (fields.get("head_dim"),)
    for key, values in neutral.items():
        if key in given and key not in architecture.fields.values() and given[key] not in values:
            raise StartupError(
                f"{path} has the metadata `{name}.{key}` with the value {given[key]!r:.80}, which is not served"
            )


def _llama3(factors: Sequence[float], fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the parameters of these factors, if there are any."""
    factor = round(max(factors))
    for original in _LLAMA3_ORIGINALS:
        parameters = {"rope_type": "llama3", "factor": float(factor), **_LLAMA3}
        parameters["original_max_position_embeddings"] = original
        expected = _llama3_factors(factor, original, fields["rope_theta"], 2 * len(factors))
        if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(factors, expected, strict=True)):
            return parameters
    raise StartupError(f"{path} scales its rotations by factors that are not Llama 3's, which is not served")


def _llama3_factors(factor: float, original: int, theta: float, dim: int) -> list[float]:
    """Compute factors as llama.cpp's converter."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    found = []
    for k in range(0, dim, 2):
        period = 2 * math.pi * theta ** (k / dim)
        if period < original / high:
            found.append(1.0)
        elif period > original / low:
            found.append(float(factor))
        else:
            smooth = (original / period - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _floats(header: GgufHeader, name: str, path: Path) -> list[float]:
    stored = header.tensors.get(name)
    if stored is None or stored.dtype != "F32" or len(stored.shape) != 1:
        raise StartupError(f"{path}: {name} is not a vector of F32")
    with open_regular(path, StartupError) as file:
        file.seek(stored.begin)
        found = file.read(stored.end - stored.begin)
    if len(found) < stored.end - stored.begin:
        raise StartupError(f"{path} has become shorter while it was read")
    return list(struct.unpack(f"<{stored.shape[0]}f", found))
