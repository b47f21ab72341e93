"""Which files serving needs, by name and index."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.conversion.weights import pickled_names
from model_server.weights.locate import SKIPPED_WORDS, WHOLE, weight_map

_SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_CODE_SUFFIXES = (".py",)
_TEMPLATES = "additional_chat_templates/"


def side_files(names: Collection[str], *, code: bool) -> list[str]:
    """List configs, tokenizer, templates, and `code` modules."""
    suffixes = _SIDE_SUFFIXES + (_CODE_SUFFIXES if code else ())
    top = [name for name in names if "/" not in name and name.endswith(suffixes)]
    templates = [name for name in names if name.startswith(_TEMPLATES) and name.count("/") == 1]
    return sorted(top + [name for name in templates if name.endswith(".jinja")])


def weights(
    model_id: str, names: Collection[str], index: Path | None, pickle_index: Path | None, *, pickled_allowed: bool
) -> list[str]:
    """List weight files by the index, or all TGI would take; pickled ones if allowed and alone."""
    safe = _listed(names, index) or _safetensors(names)
    if safe:
        return safe
    pickled = _listed(names, pickle_index) or pickled_names(_top(names))
    if not pickled:
        found = ", ".join(sorted(_top(names))[:8]) or "nothing"
        raise StartupError(f"--model-id {model_id}: the repository holds no weights in safetensors (found: {found})")
    if not pickled_allowed:
        raise StartupError(
            f"--model-id {model_id}: the repository holds pickled weights ({pickled[0]}) and no safetensors; "
            "Tercet never unpickles on its own: convert them once with "
            f"`model-server download-weights {model_id} --auto-convert`"
        )
    return pickled


def _safetensors(names: Collection[str]) -> list[str]:
    safe = [n for n in _top(names) if n.endswith(".safetensors") and not any(word in n for word in SKIPPED_WORDS)]
    return sorted(n for n in safe if not n.startswith("consolidated")) or sorted(safe)


def _listed(names: Collection[str], index: Path | None) -> list[str]:
    """List an index's files, unless it is left from others (`index_of`)."""
    listed = set() if index is None else set(weight_map(index).values())
    if listed and WHOLE in names and WHOLE not in listed:
        return [WHOLE]
    return sorted(listed & set(_top(names)))


def _top(names: Collection[str]) -> Sequence[str]:
    return [name for name in names if "/" not in name]
