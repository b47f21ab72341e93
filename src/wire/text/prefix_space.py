"""Whether a text begins with a space of its own for a tokenizer that transformers builds by GPT-2's class: it takes
`add_prefix_space` from tokenizer_config.json, and not what tokenizer.json says.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers

from wire.model_files import read_optional_config, read_optional_object

_CONFIG = "tokenizer_config.json"
_CLASS = "GPT2Tokenizer"
_TYPES = frozenset({"codegen", "dbrx", "gpt2", "gpt_neo", "gptj", "jais2", "opt", "phi", "starcoder2"})
"""Models that have this class where no file names one."""
_AS_STORED = frozenset(
    {
        "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid",
        "jamba", "kimi_linear",
        "minimax_m2", "ministral3", "mistral", "mixtral", "olmo2", "olmo3", "olmo_hybrid", "phi3", "phimoe",
        "stablelm",
    }
)  # fmt: skip
"""Models whose tokenizer.json is taken as it is, whatever class is named."""


def set_prefix_space(tokenizer: Tokenizer, folder: Path, error: type[Exception]) -> None:
    """Give a plain byte-level tokenizer the prefix space of its settings, where its class goes by them."""
    stored = tokenizer.pre_tokenizer
    if not isinstance(stored, pre_tokenizers.ByteLevel):
        return
    settings = read_optional_object(folder / _CONFIG, error)
    wanted = settings.get("add_prefix_space", False)
    if wanted == stored.add_prefix_space or not _is_of_the_class(settings.get("tokenizer_class"), folder, error):
        return
    if not isinstance(wanted, bool):
        raise error(f"{folder / _CONFIG}: `add_prefix_space` must be true or false, got {wanted!r:.200}")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=wanted)


def _is_of_the_class(named: object, folder: Path, error: type[Exception]) -> bool:
    config = read_optional_config(folder / "config.json", error)
    named = named or config.get("tokenizer_class")
    if not named:
        return config.get("model_type") in _TYPES
    return str(named).removesuffix("Fast") == _CLASS and config.get("model_type") not in _AS_STORED
