"""From a model id to its directory, by the disk alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.hub_cache import cache, snapshot
from wire.lora.merged import ADAPTER_CONFIG, BaseModel, base_model, with_base
from wire.model_files import read_object
from wire.quantization import gguf

EMBEDDED = "demo"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

# By-products that TGI does not take for weights, and adapters.
SKIPPED_WORDS = ("arguments", "args", "training", "adapter_model")

# No numbered set has more.
MAX_FILES = 10_000
# How the folder of a model in a hub cache begins, and the one in it that has the files.
_ENTRY, _BLOBS = "models--", "blobs"
_NUMBERED = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors")


def resolve(model_id: str, revision: str | None) -> Path:
    """Return the directory: demo model, folder (`/`, `./`, `../`, `~`), or hub snapshot.

    Raises:
        StartupError: It is not on this machine; NotAnId: no hub can have it.
    """
    if model_id == EMBEDDED:
        from wire import demo_model

        return Path(demo_model.path())
    if gguf.names_file(model_id):
        return _gguf_folder(model_id, revision)
    if is_local(model_id):
        return _model_directory(Path(model_id).expanduser())
    found = snapshot(model_id, revision)
    if found is None:
        raise StartupError(
            f"--model-id {model_id}: not in the local cache; run `model-server download-weights {model_id}` "
            "where the hub can be reached, or use the model `demo`, which needs no download"
        )
    return found


def resolve_merged(model_id: str, revision: str | None) -> tuple[Path, Path | None]:
    """Resolve an adapter to its base model, and its own directory."""
    found = adapter_directory(model_id, revision)
    if found is None:
        return resolve(model_id, revision), None

    def find(base: BaseModel) -> Path:
        return resolve(base.model_id, base.revision)

    return with_base(found, StartupError, is_local=is_local(model_id), find=find)


def adapter_directory(model_id: str, revision: str | None) -> Path | None:
    """Return the local adapter of a model id, if it is one."""
    if model_id == EMBEDDED or gguf.names_file(model_id):
        return None
    here = is_local(model_id)
    found = Path(model_id).expanduser() if here else snapshot(model_id, revision, ADAPTER_CONFIG)
    return None if found is None or base_model(found, StartupError, is_local=here) is None else found


def _gguf_folder(model_id: str, revision: str | None) -> Path:
    found = gguf.found_folder(model_id, revision, cache())
    if found is None:
        is_there = gguf.file_of(model_id, revision, cache()) is not None
        what = "its config and tokenizer have not been made" if is_there else "no such file"
        raise StartupError(f"--model-id {model_id}: {what}; run `model-server download-weights {model_id}`")
    return found


def is_local(model_id: str) -> bool:
    """Whether no hub is needed: `demo`, GGUF, or a directory."""
    if gguf.names_file(model_id):
        return gguf.in_repository(model_id) is None
    return model_id == EMBEDDED or model_id.startswith(("/", "./", "../", "~")) or Path(model_id).is_dir()


def weight_files(directory: Path) -> list[Path]:
    """Return sorted safetensors files, or the parts of the GGUF file, of a model.

    By the index, else `model.safetensors`, else all at depth 1 without by-products that TGI skips and copies.

    Raises:
        StartupError: None, a missing one, or a link elsewhere.
    """
    index = index_of(directory)
    if index is not None:
        return indexed_files(directory, index, (".safetensors",))
    if (directory / gguf.WEIGHTS).is_file():
        return gguf.links(directory)
    if (directory / WHOLE).is_file():
        return [_checked(directory, WHOLE)]
    if names := _safetensors_names(directory):
        return [_checked(directory, name) for name in _without_copies(directory, names)]
    found = sorted(f.name for f in directory.iterdir())
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth")) and "training" not in name]
    if pickles:
        raise StartupError(
            f"{directory} holds pickled weights ({pickles[0]}) and no safetensors; Tercet never unpickles while "
            f"serving: convert them once with `model-server download-weights {directory} --auto-convert`"
        )
    raise StartupError(f"directory {directory} has no *.safetensors (found: {', '.join(found[:8]) or 'nothing'})")


def index_of(directory: Path) -> Path | None:
    """Return the index, unless `model.safetensors` is there and the index is of other files: some that are not there.

    transformers reads that file alone, whatever an index beside it says.
    """
    index = directory / INDEX
    if not index.exists():
        return None
    if (directory / WHOLE).is_file():
        names = set(weight_map(index).values())
        if WHOLE not in names or not all(os.path.isfile(directory / name) for name in names):
            return None
    return index


def has_safetensors(directory: Path) -> bool:
    return index_of(directory) is not None or bool(_safetensors_names(directory))


def _safetensors_names(directory: Path) -> list[str]:
    return [f.name for f in directory.glob("*.safetensors") if not any(word in f.name for word in SKIPPED_WORDS)]


def indexed_files(directory: Path, index: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return an index's files, all present."""
    names = sorted(set(weight_map(index).values()))
    for name in names:
        if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(suffixes):
            raise StartupError(f"{index} names a file outside its directory or of another kind: {name!r:.200}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise StartupError(f"{directory} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}")
    return [_checked(directory, name) for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """Return an index's tensor -> file."""
    found = read_object(index, StartupError).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise StartupError(f"{index} has no usable `weight_map`")
    return found


def _without_copies(directory: Path, names: list[str]) -> list[str]:
    """Choose one model's files: no `consolidated*` or other precisions; numbered sets whole."""
    others = [name for name in names if not name.startswith("consolidated")]
    names = sorted(others or names)
    kept = [name for name in names if not any(_is_variant(name, other) for other in names)]
    for name in kept:
        if match := _NUMBERED.fullmatch(name):
            stem, width, total = match[1], len(match[2]), int(match[3])
            numbers = range(1, total + 1) if total <= MAX_FILES else range(0)
            whole = [f"{stem}-{number:0{width}d}-of-{match[3]}.safetensors" for number in numbers]
            if missing := sorted(set(whole) - set(kept)):
                raise StartupError(f"{directory} lacks {len(missing)} of {total} weight files, first {missing[0]}")
    return kept


def _is_variant(name: str, other: str) -> bool:
    stem = other.removesuffix(".safetensors")
    return name != other and name.startswith(stem + ".")


def _checked(directory: Path, name: str) -> Path:
    """Return the file, unless a link leads to what is not a weight file."""
    # Snapshots of the hub cache are links into the `blobs` beside them. People link to these, too, and to the files of
    # a store by their name.
    path = directory / name
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise StartupError(f"{path} is a link that leads nowhere") from error
    if target.suffix == path.suffix or stays_inside(directory, target) or is_blob(target):
        return path
    raise StartupError(f"{path} is a link to {target}, which is not a weight file")


def stays_inside(directory: Path, target: Path) -> bool:
    """Whether a resolved path is in `directory` or its snapshot's `blobs`."""
    home = directory.resolve()
    if target.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / _BLOBS)


def is_blob(target: Path) -> bool:
    """Whether a resolved path is a model's file in a hub cache."""
    return target.parent.name == _BLOBS and target.parent.parent.name.startswith(_ENTRY)


def _model_directory(directory: Path) -> Path:
    """Return `directory`, or name the snapshot meant by a cache entry's root."""
    if not directory.is_dir():
        raise StartupError(f"--model-id {directory}: no such directory")
    if (directory / "config.json").exists():
        return directory
    snapshots = sorted((directory / "snapshots").glob("*/config.json"))
    if snapshots:
        raise StartupError(f"{directory} is the root of a hub cache entry; use --model-id {snapshots[0].parent}")
    if (directory / ADAPTER_CONFIG).is_file():
        raise StartupError(f"{directory} is an adapter (LoRA), not a model, which is needed here: give its base model")
    found = ", ".join(sorted(f.name for f in directory.iterdir())[:8]) or "nothing"
    raise StartupError(f"directory {directory} has no config.json (found: {found})")
