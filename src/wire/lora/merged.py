"""A LoRA adapter as `--model-id`: merged into its base model, whose files serve."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from wire.model_files import read_object

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model"
_LOCAL = ("/", "./", "../", "~")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """model_id: a hub id, a folder, or `demo`. revision: None: main."""

    model_id: str
    revision: str | None


def is_adapter(names: Collection[str]) -> bool:
    """Whether these files are an adapter without a merged model."""
    if ADAPTER_CONFIG not in names:
        return False
    weights = [name for name in names if name.endswith(".safetensors") or name.startswith("pytorch_model")]
    others = [name for name in weights if "/" not in name and _WEIGHTS not in name]
    return not others and ("config.json" not in names or f"{_WEIGHTS}.safetensors" in names)


def base_model(directory: Path, error: type[Exception], *, is_local: bool) -> BaseModel | None:
    """Return the adapter's base model, if it is an adapter.

    Args:
        is_local: A folder of this machine, which may name folders.
    """
    try:
        if not is_adapter(os.listdir(directory)):
            return None
    except OSError:
        return None
    fields = read_object(directory / ADAPTER_CONFIG, error)
    name, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if not isinstance(name, str) or not name:
        raise error(
            f"{directory} holds an adapter that does not name its base model (`base_model_name_or_path` of "
            f"{ADAPTER_CONFIG}): give the base model as --model-id, and name this one in --lora-adapters"
        )
    if not is_local and (name.startswith(_LOCAL) or os.path.isdir(name) or name.count("/") > 1):
        raise error(
            f"{directory} holds an adapter whose base model {name[:200]!r} is no repository of the hub: give the base "
            "model as --model-id, and name this one in --lora-adapters"
        )
    return BaseModel(name, revision if isinstance(revision, str) and revision else None)


def with_base(
    found: Path, error: type[Exception], *, is_local: bool, find: Callable[[BaseModel], Path]
) -> tuple[Path, Path | None]:
    """Return the model's folder, and that of the adapter merged into it, if any."""
    base = base_model(found, error, is_local=is_local)
    if base is None:
        return found, None
    directory = find(base)
    if base_model(directory, error, is_local=True) is not None:
        raise error(f"{found}: its base model {base.model_id} is an adapter too; merge that one into its model first")
    return directory, found
