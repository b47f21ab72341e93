"""What a `--model-id` names: the GGUF file of `org/repo-GGUF:Q4_K_M`, or nothing that can be served."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from launcher.errors import ArgumentValidation
from launcher.planning.hub import endpoint, files_of
from launcher.planning.model_info import hub_cache
from launcher.planning.weight_files import pretended
from wire.quantization.gguf import SUFFIX, file_of, stem_of, without_later_parts

_CHOICE = re.compile(r"(.+):([A-Za-z0-9_.]+)")
_QUANTIZATION = re.compile(r"(?:^|[-._/])(I?Q\d\w*|F16|F32|BF16|MXFP4\w*)$", re.IGNORECASE)
_LOCAL = ("/", "./", "../", "~")
_MOST_SHOWN = 8
_ADDRESS = re.compile(
    r"(?:https?://[^/]+|hf:/|(?:www\.)?(?:hf\.co|huggingface\.co))/(?P<id>[^/?#]+/[^/?#]+)"
    r"(?:/(?:blob|resolve)/(?P<revision>[^/?#]+)/(?P<file>[^?#]+\.gguf))?",
    re.IGNORECASE,
)
_AT_THE_ENDS = " \t\r\n\"'"
"""What a shell takes away, but not a file of variables."""


def with_chosen_file(model_id: str, revision: str | None, environ: Mapping[str, str]) -> str:
    """Return the id of the file that `model_id` names by its quantization; other ids as they are.

    Raises:
        ArgumentValidation: No file has it, or `model_id` names no model.
        DownloadError: The hub cannot be asked.
    """
    _check_name(model_id)
    found = _CHOICE.fullmatch(model_id)
    if found is None or os.path.exists(os.path.expanduser(model_id)):
        return model_id
    place, quantization = found.groups()
    folder = Path(os.path.expanduser(place))
    if folder.is_dir():
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
    elif "/" not in place:
        raise ArgumentValidation(
            f"{model_id} is a name of ollama's library, which is not read here: give a model of the hub, as "
            "OWNER/NAME-GGUF:Q4_K_M, or a GGUF file"
        )
    elif place.startswith(_LOCAL) or place.count("/") != 1:
        return model_id
    else:
        cached = _cached(place, revision, environ)
        if _matching(cached, quantization):
            names = cached
        else:
            endpoint(environ)  # before the hub library is imported, which fails on one that is not a URL
            names = sorted(files_of(place, revision))
    return f"{place.rstrip('/')}/{_chosen(place, names, quantization)}"


def _check_name(model_id: str) -> None:
    """Refuse an address, and a name with spaces or quotes at its ends.

    Raises:
        ArgumentValidation: Says what to give instead.
    """
    if os.path.exists(os.path.expanduser(model_id)):
        return
    meant = model_id.strip(_AT_THE_ENDS)
    if meant != model_id:
        raise ArgumentValidation(f"`--model-id` {model_id!r} has spaces or quotes at its ends: give {meant}")
    address = _ADDRESS.match(model_id)
    if address is None:
        return
    parts = address.groupdict()
    found = "/".join(part for part in (parts["id"], parts["file"]) if part)
    revision = f" with --revision {parts['revision']}" if parts["revision"] not in (None, "main") else ""
    raise ArgumentValidation(f"{model_id} is an address, and no id of a model: give {found}{revision}")


def check_gguf_file(model_id: str) -> None:
    """Refuse a local GGUF file that is absent or no such file. Raises ArgumentValidation."""
    file = file_of(model_id, None, Path())
    if file is None:
        folder = Path(os.path.expanduser(model_id)).parent
        others = ", ".join(sorted(path.name for path in folder.glob(f"*{SUFFIX}"))[:_MOST_SHOWN]) or "none"
        there = f"GGUF files in its folder: {others}" if folder.is_dir() else f"there is no folder {folder}"
        raise ArgumentValidation(f"{model_id}: no such file ({there})")
    if text := pretended(file):
        raise ArgumentValidation(f"{file} is {text}")


def _chosen(place: str, names: Collection[str], quantization: str) -> str:
    """Raises ArgumentValidation."""
    matching = _matching(names, quantization)
    if not matching:
        known = dict.fromkeys(kind for name in names if (kind := quantization_in(name)) is not None)
        there = f" (there are {', '.join([*known][:_MOST_SHOWN])})" if known else ""
        raise ArgumentValidation(f"{place} has no GGUF file of {quantization}{there}")
    return min(without_later_parts(matching), key=lambda name: (name.count("/"), len(name), name))


def _matching(names: Collection[str], quantization: str) -> list[str]:
    return [name for name in names if (quantization_in(name) or "").lower() == quantization.lower()]


def quantization_in(name: str) -> str | None:
    """Return the quantization in the name of a GGUF file of weights, as `Q4_K_M`; None: it names none."""
    found = None if "mmproj" in name.lower() else _QUANTIZATION.search(stem_of(name) or "")
    return None if found is None else found[1].upper()


def _cached(repository: str, revision: str | None, environ: Mapping[str, str]) -> list[str]:
    """The GGUF files of a repository that are on this machine."""
    folder = hub_cache(environ) / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision or "main"
    snapshot = folder / "snapshots" / commit
    return [str(path.relative_to(snapshot)) for path in sorted(snapshot.rglob(f"*{SUFFIX}"))]
