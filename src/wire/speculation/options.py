"""`--speculator` and `--speculate`."""

from __future__ import annotations

from pathlib import Path

from wire.adapters import is_folder


def is_hub_speculator(value: str | None) -> bool:
    """Whether `--speculator` names a hub id."""
    return value is not None and not is_mtp(value) and not is_folder(value)


def is_mtp(value: str) -> bool:
    """Whether `--speculator` means the layer for multi-token prediction that the model's own files hold."""
    return value.lower() == "mtp"


def speculator_source(value: str, error: type[Exception]) -> tuple[str, str | None]:
    """Split `--speculator` into folder or hub id, and `@` revision."""
    if is_folder(value):
        return value, None
    place, at, revision = value.partition("@")
    if not place or (at and not revision) or "@" in revision:
        raise error(f"`--speculator` must be a folder, ID or ID@REVISION. Given: {value[:200]}")
    return place, revision or None


def check_speculation(speculator: str | None, speculate: int | None, num_stages: int, error: type[Exception]) -> None:
    """Refuses options that contradict each other, and a folder that is not there. Raises `error`."""
    if speculator is not None:
        if not is_mtp(speculator):
            place, _ = speculator_source(speculator, error)
            if is_folder(place) and not Path(place).expanduser().exists():
                raise error(f"`--speculator` {place}: no such directory")
        if speculate == 0:
            raise error("`--speculator` drafts nothing with `--speculate 0`: leave one of them out")
    if num_stages > 1 and (speculate or speculator is not None):
        raise error(
            f"{given(speculator, speculate)} cannot be combined with `--num-stage`: only the last stage would know "
            "which drafted tokens were right; leave one of them out"
        )


def check_heads(heads: str, base: str, speculate: int | None, num_stages: int, error: type[Exception]) -> None:
    """Check heads that `--model-id` names, without `--speculator`.

    Raises:
        error: They do not go with the other options.
    """
    try:
        check_speculation(heads, speculate, num_stages, error)
    except error as refusal:
        raise error(
            f"`--model-id` names heads that draft for {base}, which is served with them as `--speculator`: {refusal}"
        ) from None


def given(speculator: str | None, speculate: int | None) -> str:
    """Name the options that ask for drafts."""
    options = {f"`--speculator {speculator}`": speculator, f"`--speculate {speculate}`": speculate}
    return " and ".join(name for name, value in options.items() if value)
