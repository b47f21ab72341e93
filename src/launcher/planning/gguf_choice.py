"""`org/repo-GGUF:Q4_K_M`: which GGUF file of a repository or folder is meant."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from launcher.errors import ArgumentValidation
from launcher.planning.hub import endpoint, files_of
from launcher.planning.model_info import hub_cache
from wire.quantization.gguf import SUFFIX, stem_of, without_later_parts

_CHOICE = re.compile(r"(.+):([A-Za-z0-9_.]+)")
_QUANTIZATION = re.compile(r"(?:^|[-._/])(I?Q\d\w*|F16|F32|BF16|MXFP4\w*)$", re.IGNORECASE)
_LOCAL = ("/", "./", "../", "~")
_MOST_SHOWN = 8
_ADDRESS = re.compile(r"https?://[^/]+/([^/?#]+/[^/?#]+)")


def with_chosen_file(model_id: str, revision: str | None, environ: Mapping[str, str]) -> str:
    """Return the id of the file that `model_id` names by its quantization; other ids as they are.

    Raises:
        ArgumentValidation: No file has it, or `model_id` is an address.
        DownloadError: The hub cannot be asked.
    """
    if address := _ADDRESS.match(model_id):
        raise ArgumentValidation(f"{model_id} is an address, and no id of a model: give {address[1]}")
    found = _CHOICE.fullmatch(model_id)
    if found is None or os.path.exists(os.path.expanduser(model_id)):
        return model_id
    place, quantization = found.groups()
    folder = Path(os.path.expanduser(place))
    if folder.is_dir():
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
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
