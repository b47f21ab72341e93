"""What a model's generation_config.json says of sampling, for the routes whose requests leave it open."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.model_files import read_object, read_optional_object

AUTO, NONE = "auto", "none"
FILE = "generation_config.json"
OPTION, OVERRIDE = "`--generation-config`", "`--override-generation-config`"

logger = logging.getLogger(__name__)

_FLOAT32_MAX, _FLOAT32_TINY = 3.4028234663852886e38, 2.0**-149


@dataclass(frozen=True, kw_only=True)
class _Range:
    says: str
    low: float
    high: float = _FLOAT32_MAX
    excludes_low: bool = False
    is_whole: bool = False

    def read(self, value: object) -> float | int | None:
        """The number, or None if the value is not allowed."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return None  # also NaN
        if self.is_whole:
            return max(int(value), 0) if value == math.floor(value) else None
        number = float(value) if abs(value) >= _FLOAT32_TINY else 0.0
        return None if self.excludes_low and number == self.low else number


FIELDS: Mapping[str, _Range] = {
    "temperature": _Range(says="must be >= 0", low=0),
    "top_p": _Range(says="must be in [0, 1]", low=0, high=1),
    "top_k": _Range(says="must be a whole number, 0 or -1 for no limit", low=-1, high=2**32 - 1, is_whole=True),
    "min_p": _Range(says="must be in [0, 1]", low=0, high=1),
    "repetition_penalty": _Range(says="must be > 0", low=0, excludes_low=True),
    "presence_penalty": _Range(says="must be in [-2, 2]", low=-2, high=2),
    "frequency_penalty": _Range(says="must be in [-2, 2]", low=-2, high=2),
}
"""What is read, under the names of OpenAI's routes."""

_NOT_READ: Mapping[str, object] = {
    "typical_p": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": [],
    "suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": {}, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "encoder_repetition_penalty": 1, "penalty_alpha": 0, "num_beams": 1, "guidance_scale": 1,
}  # fmt: skip
"""Other fields that change which token comes next, and the values that switch them off."""


def sampling_defaults(
    source: str, override: str | None, folder: Path | None, error: type[Exception]
) -> dict[str, float]:
    """Return defaults of a request by field.

    Args:
        source: `auto`, `none` or a folder (`--generation-config`).
        override: JSON of `FIELDS` that win; null removes the file's.
        folder: The model's; None: unknown yet.
        error: Raised, one sentence.
    """
    path, values = _file(source, folder, error)
    found = {name: _checked(name, value, str(path), error) for name, value in _given(values).items() if name in FIELDS}
    others = [name for name, value in _given(values).items() if name in _NOT_READ and value != _NOT_READ[name]]
    if others:
        logger.warning("%s: %s: not applied, as no route has it as a default", path, ", ".join(others))
    for name, value in _overrides(override, error).items():
        found.pop(name, None)
        if value is not None:
            found[name] = _checked(name, value, OVERRIDE, error)
    return found


def _file(source: str, folder: Path | None, error: type[Exception]) -> tuple[Path, dict[str, Any]]:
    if source == NONE or (source == AUTO and folder is None):
        return Path(FILE), {}
    if source == AUTO:
        assert folder is not None
        path = folder / FILE
        return path, read_optional_object(path, error)
    asked = Path(os.path.expanduser(source))
    if not asked.is_dir():
        raise error(f"{OPTION} {source} must be {AUTO}, {NONE} or a folder with a {FILE}")
    return asked / FILE, read_object(asked / FILE, error)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _overrides(text: str | None, error: type[Exception]) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise error(f'{OVERRIDE} must be a JSON object, such as {{"temperature": 0.6}}') from None
    if not isinstance(values, dict):
        raise error(f'{OVERRIDE} must be a JSON object, such as {{"temperature": 0.6}}')
    if unknown := sorted(values.keys() - FIELDS.keys()):
        raise error(f"{OVERRIDE}: {unknown[0]} is unknown; it takes {', '.join(FIELDS)}")
    return values


def _checked(name: str, value: object, where: str, error: type[Exception]) -> float:
    number = FIELDS[name].read(value)
    if number is None:
        shown = json.dumps(value)[:40]
        remedy = "" if where == OVERRIDE else "; correct it, or start with `--generation-config none`"
        raise error(f"{where}: `{name}` {FIELDS[name].says}, given {shown}{remedy}")
    return number
