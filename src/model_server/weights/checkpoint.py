"""A checkpoint on disk: config and weight headers, read once and checked, without torch.

`models` checks what a family makes of the config; here only that no size is impossible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.names import read_named
from model_server.weights.header import Header, read_headers, stored_type
from model_server.weights.locate import index_of, weight_files, weight_map
from wire.model_files import read_config
from wire.quantization.gguf import SUFFIX

# Names of sizes in configs of all families. Fields that are not numbers are not checked here.
_LAYERS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"}
)
_SIZES = frozenset(
    {
        "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim", "d_model", "d_ff",
        "d_kv", "n_embd", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "num_attention_heads", "n_head",
        "n_heads", "num_heads", "num_key_value_heads", "num_kv_heads", "num_experts", "num_local_experts",
        "n_routed_experts", "num_experts_per_tok", "state_size", "conv_kernel", "kv_lora_rank", "q_lora_rank",
        "qk_rope_head_dim",
    }
)  # fmt: skip
# The largest vocabularies have less than 2**19 entries, the widest layers less than 2**18 numbers.
MAX_SIZE = 2**24

# float16 overflows in them; TGI loads them in bfloat16, too.
_NEED_BFLOAT16 = (
    "dbrx", "deepseek", "gemma", "gpt_oss", "idefics3", "llama4", "mamba", "mllama", "paligemma", "qwen2_vl",
    "qwen2_5_vl", "qwen3_vl",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was found."""

    directory: Path
    # Of config.json.
    fields: Mapping[str, Any]
    # Of each weight file; `file_bytes`: of all.
    headers: Mapping[Path, Header]
    file_bytes: int
    # The folder of an adapter merged in when weights are read, if any.
    merged: Path | None = None
    # Tensors outside of the headers, of what reads images.
    other: tuple[str, ...] = ()

    @property
    def needs_bfloat16(self) -> bool:
        """Whether float16 is too narrow for the activations."""
        model_type = self.fields.get("model_type")
        return isinstance(model_type, str) and model_type.startswith(_NEED_BFLOAT16)

    @property
    def stored_in(self) -> str | None:
        """Return the type of most floating-point bytes, in the header's words."""
        return stored_type(tensor for header in self.headers.values() for tensor in header.tensors.values())


def examine(directory: Path, merged: Path | None = None) -> Checkpoint:
    """Read all that serving needs, except the tokenizer."""
    fields = read_config(directory / "config.json", StartupError)
    files = weight_files(directory)
    headers = {file: read_named(file) for file in files} if files[0].suffix == SUFFIX else read_headers(files)
    _check_sizes(fields, sum(len(header.tensors) for header in headers.values()))
    if (index := index_of(directory)) is not None:
        _check_index(index, {file.name: header for file, header in headers.items()})
    return Checkpoint(
        directory=directory,
        fields=fields,
        headers=headers,
        file_bytes=sum(file.stat().st_size for file in headers),
        merged=merged,
    )


def _check_sizes(config: Mapping[str, Any], num_tensors: int) -> None:
    for name, value in _numbers(config):
        if name not in _LAYERS and name not in _SIZES:
            continue
        if not 0 <= value <= MAX_SIZE or not math.isfinite(value):
            raise StartupError(f"config.json: `{name}` is {value}, which is impossible")
        if name in _LAYERS and value > num_tensors:
            raise StartupError(f"config.json: `{name}` is {value}, but the weight files hold {num_tensors} tensors")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield numbers of a config and nested ones."""
    for name, value in config.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
        elif isinstance(value, dict) and name.endswith("_config"):
            yield from _numbers(value)


def _check_index(index: Path, headers: Mapping[str, Header]) -> None:
    """Check that files have the tensors that the index promises."""
    missing = [(name, file) for name, file in weight_map(index).items() if name not in headers[file].tensors]
    if missing:
        name, file = missing[0]
        raise StartupError(f"{index} lists {name!r:.200} in {file}, which lacks it ({len(missing)} such tensors)")
