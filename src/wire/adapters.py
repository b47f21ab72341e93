"""Which adapters are loaded with the model under names of their own, and where they are: `--lora-adapters`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._:-][A-Za-z0-9._:/-]{0,199}")
RANKS = (8, 16, 32, 64, 128, 256)
"""Of slots for adapters."""
DEFAULT_SLOTS = 8
DEFAULT_RANK = 64
MAX_NEW_ROWS = 1024
"""Of an embedding or head."""
_BASE = "tgi"
"""What OpenAI's clients of TGI call the base model."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter's name for requests, and its folder, or hub id and `revision`."""

    name: str
    place: str
    revision: str | None = None

    @property
    def is_folder(self) -> bool:
        return is_folder(self.place)


def adapter_sources(value: str | None, error: type[Exception], *, taken: Collection[str] = ()) -> list[AdapterSource]:
    """Read `id`, `id@revision`, `name=path`, `name=id@revision` or `path`, separated by commas.

    Args:
        error: Raised for what cannot be read, and invalid or taken names.
        taken: Names of the base model.
    """
    found: dict[str, AdapterSource] = {}
    for entry in _entries(value):
        source = _source(entry, error)
        name = source.name
        check_name(name, error, taken=taken, hint=", as in `name=path`")
        if name in found:
            raise error(f"LoRA adapter name `{name}` is given twice; give another one, as in `name=path`")
        found[name] = source
    return list(found.values())


def check_adapters(value: str | None, error: type[Exception], *, taken: Collection[str]) -> None:
    """`--lora-adapters`, as far as it can be known before anything is fetched. Raises `error`."""
    for source in adapter_sources(value, error, taken=taken):
        folder = Path(source.place).expanduser()
        if source.is_folder and not (folder / "adapter_config.json").is_file():
            raise error(f"LoRA adapter `{source.name}`: no adapter_config.json in {folder}")


def check_lora_root(root: str | None, keys: object, error: type[Exception], *, leads: bool = True) -> None:
    """Refuses a `--lora-root` that cannot be served. leads: clients reach this node. Raises `error`."""
    if root is None:
        return
    if not Path(root).expanduser().is_dir():
        raise error(f"`--lora-root` {root}: no such directory")
    if keys is None and leads:
        raise error("`--lora-root` lets clients load adapters: it needs `--api-key` or `--keys-file`")


def check_slots(slots: int | None, max_rank: int | None, adapters: str | None, error: type[Exception]) -> None:
    """`--lora-slots` and `--lora-max-rank`, beside --lora-adapters or --lora-root. Raises `error`."""
    for flag, value in (("--lora-slots", slots), ("--lora-max-rank", max_rank)):
        if value is not None and not adapters:
            raise error(f"`{flag}` needs adapters: name some in `--lora-adapters`, or give `--lora-root`")
    if max_rank is not None and max_rank not in RANKS:
        raise error(f"`--lora-max-rank` {max_rank}: choose one of {', '.join(map(str, RANKS))}")


def check_name(name: str, error: type[Exception], *, taken: Collection[str] = (), hint: str = "") -> None:
    """Whether requests can ask for an adapter by `name`. taken: names of the base model. Raises `error`."""
    if not _NAME.fullmatch(name) or ".." in name.split("/"):
        raise error(
            f"LoRA adapter name `{name[:200]}`: 1 to 200 letters, digits and `._:-/` are allowed, no leading `/` "
            f"and no part `..`; give another name{hint}"
        )
    if name == _BASE or name in taken:
        raise error(f"LoRA adapter name `{name}` is a name of the base model; give another one{hint}")


def _entries(value: str | None) -> Iterator[str]:
    return filter(None, (part.strip() for part in (value or "").split(",")))


def _source(entry: str, error: type[Exception]) -> AdapterSource:
    named, _, place = entry.rpartition("=")
    place, at, revision = place.partition("@")
    if (
        entry.count("=") > 1
        or entry.count("@") > 1
        or not place
        or ("=" in entry and not named)
        or (at and not revision)
    ):
        raise error(f"Invalid LoRA adapter format: {entry[:200]}")  # TGI's words
    return AdapterSource(named or (Path(place).name if is_folder(place) else place), place, revision or None)


def is_folder(place: str) -> bool:
    return place.startswith(("/", "./", "../", "~")) or Path(place).is_dir()
