"""From a model id to the directory that holds its files. Reads the disk only; `weights.download` uses the network."""

from __future__ import annotations

from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.hub import snapshot
from model_server.weights.json_file import read_object

EMBEDDED = "demo"

# By-products that TGI does not take for weights (model_server.md 5.2), and adapters.
SKIPPED_WORDS = ("arguments", "args", "training", "adapter_model")


def resolve(model_id: str, revision: str | None) -> Path:
    """The local directory of `model_id`: the embedded demo model, a directory, or a snapshot in the hub cache.

    An id that starts with `/`, `./`, `../` or `~` is always a directory (launcher.md R13).
    Raises StartupError with one line that says what to do.
    """
    if model_id == EMBEDDED:
        from wire import demo_model

        return Path(demo_model.path())
    if is_local(model_id):
        return _model_directory(Path(model_id).expanduser())
    found = snapshot(model_id, revision)
    if found is None:
        raise StartupError(
            f"--model-id {model_id}: not in the local cache; run `model-server download-weights {model_id}` "
            "where the hub can be reached, or use `--model-id demo`, which needs no download"
        )
    return found


def is_local(model_id: str) -> bool:
    """Whether `model_id` needs no hub: `demo`, or a directory, existing or clearly meant."""
    return model_id == EMBEDDED or model_id.startswith(("/", "./", "../", "~")) or Path(model_id).is_dir()


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model in `directory`, sorted by name.

    With `model.safetensors.index.json` those it lists (launcher.md R12), else all at depth 1 except the by-products
    that TGI skips (model_server.md 5.2). Raises StartupError if there are none, or if a listed one is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(directory, index)
    files = sorted(f for f in directory.glob("*.safetensors") if not any(word in f.name for word in SKIPPED_WORDS))
    if files:
        return files
    pickles = sorted(f.name for f in directory.iterdir() if f.suffix in (".bin", ".pt") and "training" not in f.name)
    if pickles:
        raise StartupError(
            f"{directory} holds pickled weights ({pickles[0]}) and no safetensors; Tercet never unpickles while "
            "serving: convert them to safetensors first (a conversion command is planned, not part of this version)"
        )
    found = ", ".join(sorted(f.name for f in directory.iterdir())[:8]) or "nothing"
    raise StartupError(f"directory {directory} has no *.safetensors (found: {found})")


def _indexed_files(directory: Path, index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise StartupError(f"{index} has no usable `weight_map`")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise StartupError(f"{index} names a file outside its directory")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise StartupError(f"{directory} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}")
    return [directory / name for name in names]


def _model_directory(directory: Path) -> Path:
    """`directory` itself, unless it is the root of a hub cache entry: then name the snapshot the user meant."""
    if not directory.is_dir():
        raise StartupError(f"--model-id {directory}: no such directory")
    if (directory / "config.json").is_file():
        return directory
    snapshots = sorted((directory / "snapshots").glob("*/config.json"))
    if snapshots:
        raise StartupError(f"{directory} is the root of a hub cache entry; use --model-id {snapshots[0].parent}")
    found = ", ".join(sorted(f.name for f in directory.iterdir())[:8]) or "nothing"
    raise StartupError(f"directory {directory} has no config.json (found: {found})")


def weight_file_bytes(directory: Path) -> int:
    """Size of the model's weight files. Raises StartupError as `weight_files`."""
    return sum(file.stat().st_size for file in weight_files(directory))
