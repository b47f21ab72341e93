"""What sentence-transformers writes beside a model: the modules behind it, its longest input, its prompts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from wire.model_files import length_limit, read_optional_array, read_optional_object, token_text

ModuleKind = Literal["Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "SpladePooling", "LogitScore"]
_KINDS: dict[str, ModuleKind] = {
    "Transformer": "Transformer", "MLMTransformer": "Transformer", "Pooling": "Pooling", "Dense": "Dense",
    "LayerNorm": "LayerNorm", "Normalize": "Normalize", "SpladePooling": "SpladePooling", "LogitScore": "LogitScore",
}  # fmt: skip
# Where the settings of the first module may be, the newest name first.
_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Module:
    """One entry of modules.json. folder: where its own files are; config: its config.json, or {}."""

    kind: ModuleKind
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SentenceFiles:
    """What was found; empty for a model that sentence-transformers has not saved."""

    modules: tuple[Module, ...] = ()
    is_saved: bool = False
    """Whether sentence-transformers' own config is there."""
    max_length: int | None = None
    """Tokens of the longest input, special ones included."""
    lower_case: bool = False
    """Texts are put into lower case before they are cut into tokens."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    typed: bool = True
    """The model tells the texts of a pair apart."""
    appended: str | None = None
    """A token behind every text, also where tokenizer.json does not put it there."""
    activation: str | None = None
    """Of the scores of a cross encoder: the name of torch's class."""

    def module(self, *kinds: ModuleKind) -> Module | None:
        """The first module of one of these kinds."""
        return next((module for module in self.modules if module.kind in kinds), None)


def read(folder: Path, config: Mapping[str, Any], error: type[Exception]) -> SentenceFiles:
    """Read the files in `folder`, if modules are served."""
    modules = _modules(folder, error)
    first = next((module for module in modules if module.kind == "Transformer"), None)
    of_transformer: Mapping[str, Any] = {}
    for name in _TRANSFORMER_CONFIGS:
        of_transformer = read_optional_object((folder if first is None else first.folder) / name, error)
        if of_transformer:
            break
    saved = read_optional_object(folder / "config_sentence_transformers.json", error)
    prompts = saved.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise error(f"{folder}/config_sentence_transformers.json: `prompts` must be an object of texts")
    tokenizer = read_optional_object(folder / "tokenizer_config.json", error)
    return SentenceFiles(
        modules=modules,
        is_saved=bool(saved),
        max_length=length_limit(of_transformer.get("max_seq_length")),
        lower_case=of_transformer.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt_name=_text(saved.get("default_prompt_name")),
        typed=_is_typed(tokenizer),
        appended=_appended(config, tokenizer),
        activation=_activation(saved, config),
    )


def _modules(folder: Path, error: type[Exception]) -> tuple[Module, ...]:
    path = folder / "modules.json"
    modules = []
    for entry in read_optional_array(path, error):
        kind = str(entry.get("type", "")).rpartition(".")[2] if isinstance(entry, dict) else ""
        if kind not in _KINDS:
            served = ", ".join(sorted(set(_KINDS)))
            raise error(f"{path}: modules of the type {kind or repr(entry)[:100]} are not served; served: {served}")
        inner = str(entry.get("path", ""))
        try:
            place = Path(os.path.realpath(folder / inner))
        except ValueError:  # no path at all
            place = folder.parent
        if not place.is_relative_to(folder.resolve()):
            raise error(f"{path}: the path {inner!r:.100} leaves the model's folder")
        config = {} if place == folder.resolve() else read_optional_object(place / "config.json", error)
        modules.append(Module(_KINDS[kind], place, config))
    if modules and modules[0].kind != "Transformer":
        raise error(f"{path}: the first module must be a Transformer, not {modules[0].kind}")
    return tuple(modules)


def _activation(saved: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Newer cross encoders name it in sentence-transformers' config, older ones in the model's."""
    inner = config.get("sentence_transformers")
    places = (saved.get("activation_fn"), inner.get("activation_fn") if isinstance(inner, dict) else None,
              config.get("sbert_ce_default_activation_function"))  # fmt: skip
    found = next((text for text in map(_text, places) if text is not None), None)
    return None if found is None else found.rpartition(".")[2]


def _appended(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> str | None:
    """What the tokenizer's config asks for; gte-Qwen2's own tokenizer class appends one that it does not name."""
    if tokenizer.get("add_eos_token") is True:
        return token_text(tokenizer.get("eos_token"))
    classes = config.get("auto_map")
    known = isinstance(classes, dict) and "modeling_qwen.Qwen2Model" in str(classes.get("AutoModel"))
    return "<|endoftext|>" if known else None


def _is_typed(tokenizer: Mapping[str, Any]) -> bool:
    names = tokenizer.get("model_input_names")
    return not isinstance(names, list) or "token_type_ids" in names


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
