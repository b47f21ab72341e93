"""The model's small files: tokenizer, template, config facts; of an adapter its base model's. Never weights or
network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.errors import StartupError
from wire import tokenizer_file
from wire.lora.merged import with_base
from wire.model_files import (
    NAMED_TOKENS,
    POSITIONS,
    length_limit,
    read_optional_config,
    read_optional_object,
    read_text,
    token_text,
)
from wire.quantization import gguf
from wire.text.added_tokens import tokenizer_settings
from wire.text.model_name import quantization_name

DEMO = "demo"
_PATTERNS = ["*.json", "*.jinja", "additional_chat_templates/*"]


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What was found; `templates` by name, one `default`."""

    model_id: str
    folder: Path
    sha: str | None = None
    tokenizer_json: Path
    max_positions: int | None = None
    tokenizer_max_length: int | None = None
    named_tokens: dict[str, str] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    quantization: str | None = None  # as people say it; None: the weights are plain


def load(
    model_id: str, *, revision: str | None, tokenizer_config_path: str | None = None, chat_template: str | None = None
) -> ModelFiles:
    """Find and read the files."""
    found = locate(model_id, revision)
    folder, _ = with_base(
        found,
        StartupError,
        is_local=os.path.isdir(os.path.expanduser(model_id)),
        find=lambda base: locate(base.model_id, base.revision),
    )
    tokenizer_json = tokenizer_file.find(folder)
    if tokenizer_json is None:
        raise StartupError(
            f"{model_id} has no tokenizer.json in {folder}: fetch or convert the model first "
            f"(`model-server download-weights {model_id}`)"
        )
    config = read_optional_config(folder / "config.json", StartupError)
    own_tokenizer_config = folder / "tokenizer_config.json"
    tokenizer_config = _read_json(Path(tokenizer_config_path) if tokenizer_config_path else own_tokenizer_config)
    templates = (
        {"default": read_text(Path(chat_template), StartupError)}
        if chat_template
        else _templates(folder, tokenizer_config)
    )
    return ModelFiles(
        model_id=model_id,
        folder=folder,
        sha=found.name if found.parent.name == "snapshots" else None,
        tokenizer_json=tokenizer_json,
        max_positions=_max_positions(config),
        tokenizer_max_length=length_limit(tokenizer_config.get("model_max_length")),
        named_tokens=_named_tokens(folder, tokenizer_config),
        templates=templates,
        quantization=quantization_name(config),
    )


def locate(model_id: str, revision: str | None) -> Path:
    """The folder that holds the model's files."""
    if model_id == DEMO:
        from wire import demo_model

        return Path(demo_model.path())
    if gguf.names_file(model_id):
        return _gguf_folder(model_id, revision)
    folder = Path(os.path.expanduser(model_id))  # Path's own raises where there is no such user
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, revision=revision, local_files_only=True, allow_patterns=_PATTERNS))
    except LocalEntryNotFoundError:
        where = f"{model_id} (revision {revision})" if revision else model_id
        raise StartupError(
            f"{where} is neither a directory nor in the local hub cache: fetch it first "
            f"(`model-server download-weights {model_id}`)"
        ) from None
    except HFValidationError:
        raise StartupError(f"{model_id!r} is neither a directory nor a hub id") from None


def _gguf_folder(model_id: str, revision: str | None) -> Path:
    from huggingface_hub import constants

    folder = gguf.found_folder(model_id, revision, Path(constants.HF_HUB_CACHE))
    if folder is None:
        raise StartupError(
            f"the config and tokenizer of {model_id} are not in the local hub cache: make them first "
            f"(`model-server download-weights {model_id}`)"
        )
    return folder


def _templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Look where transformers and TGI do, first find wins."""
    found: dict[str, str] = {}
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        found["default"] = read_text(jinja, StartupError)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path, StartupError)
    for source in (
        _read_json(folder / "chat_template.json"),
        tokenizer_config,
        _read_json(folder / "processor_config.json"),
    ):
        for name, text in _named_templates(source.get("chat_template")):
            found.setdefault(name, text)
    return found


def _named_templates(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [("default", value)]
    if isinstance(value, list):
        items = [item for item in value if isinstance(item, dict)]
        return [(str(item["name"]), str(item["template"])) for item in items if {"name", "template"} <= item.keys()]
    if isinstance(value, dict):
        return [(str(name), text) for name, text in value.items() if isinstance(text, str)]
    return []


def _named_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    # The named tokens that transformers passes to every template.
    merged = tokenizer_settings(folder, tokenizer_config, StartupError)
    tokens = {}
    for name in NAMED_TOKENS:
        if (text := token_text(merged.get(name))) is not None:
            tokens[name] = text
    return tokens


def _max_positions(config: dict[str, Any]) -> int | None:
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for name in POSITIONS:
            if (length := length_limit(source.get(name))) is not None:
                return length
    return None


def _read_json(path: Path) -> dict[str, Any]:
    return read_optional_object(path, StartupError)
