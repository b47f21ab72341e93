"""What `adapter_config.json` says of a LoRA adapter, and what of it is refused.

Which modules change is decided by the tensors: several forms of `target_modules` save the same file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.locate import is_blob, stays_inside
from wire.adapters import MAX_NEW_ROWS
from wire.lora.merged import ADAPTER_CONFIG
from wire.model_files import read_object

MAX_CONFIG_BYTES = 2**20
MAX_RANK = 256
_LARGEST = 1e6

# Fields that say how the adapter was trained, or what the tensors say themselves.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "fan_in_fan_out",
        "inference_mode", "layers_pattern", "layers_to_transform", "lora_bias", "lora_dropout", "megatron_core",
        "modules_to_save", "peft_version", "qalora_group_size", "revision", "target_modules", "target_parameters",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "task_type",
        "trainable_token_indices", "use_dora", "use_rslora",
    }
)  # fmt: skip
# Ways to initialise that leave the base model as it is; all others subtract the first product from its weights.
_KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")

# Patterns may repeat only `.`, and that twice at most, and all of them together may go so many ways through a name:
# more could be matched for hours.
_MAX_PATTERNS, _MAX_PATTERN_LENGTH, _MAX_REPEATS, _MAX_WAYS = 4096, 1000, 2, 20_000
_WAYS_OF_A_REPEAT = 16
_Patterns = tuple[tuple[str, float], ...]  # in their order: the first that matches decides
_OPERATORS = re.compile(r"[*+?{}]")
_ALTERNATIVES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([(|)])", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter was made with; equal ones mean the same."""

    rank: int
    alpha: float
    rank_pattern: _Patterns
    alpha_pattern: _Patterns
    rank_stabilized: bool
    # Whether each pair has lengths of its rows.
    uses_dora: bool
    # Of new rows, by the end of their module's name; "": of every one.
    token_ids: tuple[tuple[str, tuple[int, ...]], ...]
    # The model that it was made for.
    base: str | None

    def rank_of(self, module: str) -> int:
        """Return the inner size for `module`, named as in the base model."""
        return int(_of_module(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor on B @ A."""
        rank = self.rank_of(module)
        return _of_module(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)

    def token_ids_of(self, module: str) -> tuple[int, ...]:
        """Return the tokens of the new rows of `module`."""
        for key, ids in self.token_ids:
            if key in ("", module) or module.endswith("." + key):
                return ids
        raise StartupError(f"`trainable_token_indices` names no tokens for {module:.100}")


def read_config(directory: Path) -> AdapterConfig:
    """Read the config; errors do not name the adapter."""
    path = directory / ADAPTER_CONFIG
    if not path.exists():
        found = ", ".join(sorted(f.name for f in directory.iterdir())[:8]) if directory.is_dir() else ""
        raise StartupError(f"no {ADAPTER_CONFIG} in {directory} (found: {found or 'nothing'})")
    if not stays_inside(directory, path.resolve()) and not is_blob(path.resolve()):
        raise StartupError(f"{path} is a link that leads out of the folder")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise StartupError(f"{path} is larger than {MAX_CONFIG_BYTES // 2**20} MiB")
    fields = read_object(path, StartupError)
    _refuse(fields)
    base = fields.get("base_model_name_or_path")
    return AdapterConfig(
        rank=int(_number(fields, "r", 8, whole=True)),
        alpha=_number(fields, "lora_alpha", 8),
        rank_pattern=_patterns(fields, "rank_pattern", whole=True),
        alpha_pattern=_patterns(fields, "alpha_pattern"),
        rank_stabilized=_is_set(fields, "use_rslora"),
        uses_dora=_is_set(fields, "use_dora"),
        token_ids=_token_ids(fields.get("trainable_token_indices")),
        base=base if isinstance(base, str) else None,
    )


def _refuse(fields: Mapping[str, Any]) -> None:
    kind, task, start = fields.get("peft_type"), fields.get("task_type"), fields.get("init_lora_weights")
    if kind != "LORA":
        raise StartupError(f"`peft_type` is {kind!r:.80}; only LORA is served")
    if task not in ("CAUSAL_LM", None):
        raise StartupError(f"`task_type` is {task!r:.80}; only CAUSAL_LM is served")
    if not any(start is known or start == known for known in _KEEPS_BASE):
        raise StartupError(
            f"`init_lora_weights` {start!r:.80} changes the base model; convert the adapter with PEFT first"
        )
    for name, value in fields.items():
        if name not in _READ and name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            raise StartupError(f"`{name:.80}` is not served; merge the adapter into the model")


def _number(fields: Mapping[str, Any], name: str, default: int, *, whole: bool = False) -> float:
    return _checked(name, fields.get(name, default), whole=whole)


def _checked(name: str, value: Any, *, whole: bool) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    if not usable or (whole and (value != int(value) or not 0 < value <= MAX_RANK)):
        wanted = f"a whole number from 1 to {MAX_RANK}" if whole else "a number"
        raise StartupError(f"{ADAPTER_CONFIG}: `{name}` is {value!r:.80}; {wanted} is expected")
    return float(value)


def _is_set(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False) or type(value) is int:
        raise StartupError(f"{ADAPTER_CONFIG}: `{name}` is {value!r:.80}; true or false is expected")
    return value is True


def _patterns(fields: Mapping[str, Any], name: str, *, whole: bool = False) -> _Patterns:
    found = fields.get(name)
    if found is None:
        return ()
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise StartupError(f"{ADAPTER_CONFIG}: `{name}` must be an object with at most {_MAX_PATTERNS} entries")
    num_ways = 0
    for key in found:
        if len(key) > _MAX_PATTERN_LENGTH or key.count(".*") > _MAX_REPEATS or _OPERATORS.search(key.replace(".*", "")):
            raise StartupError(f"{ADAPTER_CONFIG}: `{name}` has the pattern {key!r:.80}, which is too complex")
        try:
            _compiled(key)
        except (re.error, RecursionError, OverflowError):
            raise StartupError(f"{ADAPTER_CONFIG}: `{name}` has the invalid pattern {key!r:.80}") from None
        num_ways += _num_ways(key)
        if num_ways > _MAX_WAYS:
            raise StartupError(f"{ADAPTER_CONFIG}: `{name}` is too complex from the pattern {key!r:.80} on")
    return tuple((key, _checked(name, value, whole=whole)) for key, value in found.items())


def _num_ways(pattern: str) -> int:
    """Bound the ways to try a valid pattern at one place of a name."""
    ways: int = _WAYS_OF_A_REPEAT ** pattern.count(".*")
    open_groups = [1]
    for found in _ALTERNATIVES.finditer(f"{pattern})"):
        if found[1] == "(":
            open_groups.append(1)
        elif found[1] == "|":
            open_groups[-1] += 1
        elif found[1] == ")":
            ways *= open_groups.pop()
    return ways


def _token_ids(said: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Read `trainable_token_indices`, a list or lists by module, in PEFT's order."""
    if said is None:
        return ()
    found: dict[str, tuple[int, ...]] = {}
    for module, ids in (said if isinstance(said, dict) else {"": said}).items():
        are_ids = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
        if not are_ids or len(ids) > MAX_NEW_ROWS or len(set(ids)) < len(ids):
            raise StartupError(
                f"{ADAPTER_CONFIG}: `trainable_token_indices` must be a list of different tokens, or such lists by "
                f"module, of at most {MAX_NEW_ROWS} tokens each"
            )
        found[module] = tuple(ids)
    return tuple(found.items())


def _of_module(patterns: _Patterns, module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name."""
    return next((value for key, value in patterns if _compiled(key).match(module)), default)


@lru_cache(_MAX_PATTERNS)
def _compiled(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")
