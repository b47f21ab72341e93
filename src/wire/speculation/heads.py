"""Which folders hold heads that draft for another model, by config.json, as TGI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from wire.adapters import is_folder
from wire.model_files import read_object

EAGLE3_TENSORS = frozenset({"d2t", "fc.weight"})
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


class SpeculatorKind(Enum):
    """The value is how messages call it."""

    MEDUSA = "medusa models"
    MLP = "mlp_speculator models"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads on a model's hidden states, guessing `number` tokens."""

    kind: SpeculatorKind
    # The model, if the config says it.
    base: str | None
    number: int


def heads_in(fields: Mapping[str, Any], error: type[Exception]) -> Heads | None:
    """Return the heads that a config.json describes, if any."""
    base = fields.get("base_model_name_or_path")
    base = base if isinstance(base, str) and base else None
    if "medusa_num_heads" in fields:
        return Heads(SpeculatorKind.MEDUSA, base, _count(fields, "medusa_num_heads", error))
    if fields.get("model_type") == "mlp_speculator":
        return Heads(SpeculatorKind.MLP, base, _count(fields, "n_predict", error))
    return None


def is_eagle3(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is of EAGLE-3, for `--speculator` only; some are known by tensors (`EAGLE3_TENSORS`)."""
    named = fields.get("architectures")
    architectures = [one for one in named if isinstance(one, str)] if isinstance(named, list) else []
    return fields.get("speculators_model_type") == "eagle3" or any("eagle3" in one.lower() for one in architectures)


def has_no_text(folder: Path, error: type[Exception]) -> bool:
    """Whether a folder holds a drafter that needs no tokenizer of its own."""
    if not (folder / "config.json").is_file():
        return False
    fields = read_object(folder / "config.json", error)
    return heads_in(fields, error) is not None or is_eagle3(fields)


def heads_of(folder: Path | None, error: type[Exception]) -> Heads | None:
    """`heads_in` of the config.json in a folder; None also where there is none."""
    if folder is None or not (folder / "config.json").is_file():
        return None
    return heads_in(read_object(folder / "config.json", error), error)


def base_of(heads: Heads, model_id: str, *, is_local: bool, error: type[Exception]) -> str:
    """Return the heads' base model.

    Args:
        is_local: Heads in a local folder, which may name folders.
    """
    named = f"--model-id {model_id} holds {heads.kind.value.removesuffix('s')} heads"
    if heads.kind is SpeculatorKind.MLP:
        named = f"--model-id {model_id} holds an MLP speculator"
    if heads.base is None:
        raise error(
            f"{named}, and its config.json names no `base_model_name_or_path`: serve the model that they were trained "
            f"for with `--speculator {model_id}`"
        )
    if not is_local and (is_folder(heads.base) or not _HUB_ID.fullmatch(heads.base)):
        raise error(f"{named}, whose `base_model_name_or_path` {heads.base[:200]!r} is not the id of a repository")
    return heads.base


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What `--model-id` and `--revision` mean where they name heads. revision: None for a folder."""

    model_id: str
    revision: str | None
    speculator: str


def served_model(
    model_id: str, revision: str | None, folder: Path | None, speculator: str | None, error: type[Exception]
) -> ServedModel | None:
    """Return the base of the heads in `folder`, if it holds any; `speculator` must not be given then.

    Raises:
        error: They are no heads, or `speculator` is given.
    """
    heads = heads_of(folder, error)
    if heads is None:
        return None
    if speculator is not None:
        raise error(f"--model-id {model_id} holds heads already: give their base model, or leave out `--speculator`")
    is_local = is_folder(model_id)
    base = base_of(heads, model_id, is_local=is_local, error=error)
    drafts = model_id if is_local or revision is None else f"{model_id}@{revision}"
    return ServedModel(base, None if is_folder(base) else "main", drafts)


def check_length(heads: Heads, speculate: int | None, error: type[Exception]) -> int:
    """The longest draft: what `--speculate` says, or as many tokens as there are heads. Raises `error`."""
    if speculate is not None and speculate > heads.number:
        # TGI's words.
        raise error(
            f"Speculate is set to `{speculate}` but this {heads.kind.value} only has `{heads.number}` heads, "
            "please make them match"
        )
    return min(heads.number, MOST) if speculate is None else speculate


MOST = 15
"""The longest draft that `--speculate` may ask for."""


def _count(fields: Mapping[str, Any], name: str, error: type[Exception]) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1000:
        raise error(f"config.json: `{name}` is {value!r:.100}; it must be a number of heads")
    return value
