"""From a model id to the directory that holds its files. Reads the disk only; `weights.download` uses the network."""

from __future__ import annotations

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
    """The local directory of `model_id`: the embedded demo model, a directory, or a snapshot in the hub cache.

    An id that starts with `/`, `./`, `../` or `~` is always a directory.
    Raises StartupError with one line that says what to do.
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
    """As `resolve`, also for an adapter: the directory of its base model, then its own; None: there is none.

    Raises StartupError.
    """
    found = adapter_directory(model_id, revision)
    if found is None:
        return resolve(model_id, revision), None

    def find(base: BaseModel) -> Path:
        return resolve(base.model_id, base.revision)

    return with_base(found, StartupError, is_local=is_local(model_id), find=find)


def adapter_directory(model_id: str, revision: str | None) -> Path | None:
    """Where the adapter is that a model id names; None: it names none, or one that is not here. Raises StartupError."""
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
    """Whether `model_id` needs no hub: `demo`, a GGUF file, or a directory, existing or clearly meant."""
    if gguf.names_file(model_id):
        return gguf.in_repository(model_id) is None
    return model_id == EMBEDDED or model_id.startswith(("/", "./", "../", "~")) or Path(model_id).is_dir()


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model in `directory`, sorted by name; or the GGUF file for which it was made.

    With an index (`index_of`) those it lists, else all at depth 1 except the by-products that TGI skips and
    second copies of the same weights. Raises StartupError if there are none, if one that is listed, or that belongs to
    a numbered set, is missing, or if a link leads to something else.
    """
    index = index_of(directory)
    if index is not None:
        return indexed_files(directory, index, (".safetensors",))
    if (directory / gguf.WEIGHTS).is_file():
        return [directory / gguf.WEIGHTS]
    if (directory / INDEX).exists():
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
    """`model.safetensors.index.json`; None: there is none, or it is left from other files, since it does not list the
    `model.safetensors` beside it, which transformers reads as the whole model then, too. Raises StartupError."""
    index = directory / INDEX
    if not index.exists() or ((directory / WHOLE).is_file() and WHOLE not in weight_map(index).values()):
        return None
    return index


def has_safetensors(directory: Path) -> bool:
    """Whether there are weights that need no conversion, whole or not."""
    return index_of(directory) is not None or bool(_safetensors_names(directory))


def _safetensors_names(directory: Path) -> list[str]:
    return [f.name for f in directory.glob("*.safetensors") if not any(word in f.name for word in SKIPPED_WORDS)]


def indexed_files(directory: Path, index: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that an index lists. Raises StartupError if it is not an index, leads elsewhere, or one is missing."""
    names = sorted(set(weight_map(index).values()))
    for name in names:
        if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(suffixes):
            raise StartupError(f"{index} names a file outside its directory or of another kind: {name!r:.200}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise StartupError(f"{directory} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}")
    return [_checked(directory, name) for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, as an index has it. Raises StartupError if it has none."""
    found = read_object(index, StartupError).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise StartupError(f"{index} has no usable `weight_map`")
    return found


def _without_copies(directory: Path, names: list[str]) -> list[str]:
    """The safetensors files of a directory without an index that make up one model.

    Original releases are beside converted ones as `consolidated*`, and other precisions as `model.fp16.safetensors`. A
    numbered set (`-00001-of-00003`) must be whole.
    """
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
    """The file, unless it is a link that leads out of the directory to something that is not a weight file.

    Snapshots of the hub cache are links into the `blobs` beside them. People link to these, too, and to the files of a
    store by their name.
    """
    path = directory / name
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise StartupError(f"{path} is a link that leads nowhere") from error
    if target.suffix == path.suffix or stays_inside(directory, target) or is_blob(target):
        return path
    raise StartupError(f"{path} is a link to {target}, which is not a weight file")


def stays_inside(directory: Path, target: Path) -> bool:
    """Whether `target`, a resolved path, is in `directory`, or for a snapshot of the hub cache in its `blobs`."""
    home = directory.resolve()
    if target.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / _BLOBS)


def is_blob(target: Path) -> bool:
    """Whether `target`, a resolved path, is a file of a model in a hub cache, which may be linked to to be read."""
    return target.parent.name == _BLOBS and target.parent.parent.name.startswith(_ENTRY)


def _model_directory(directory: Path) -> Path:
    """`directory` itself, unless it is the root of a hub cache entry: then name the snapshot the user meant."""
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
