"""What this machine offers: memory within containers' limits, and bfloat16 products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def free_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that processes may still take, kept files included, if known.

    Args:
        root: Where `proc` and `sys` are mounted.
    """
    known = [_meminfo(root).get("MemAvailable"), *(max(0, limit - used) for limit, used in _limits(root))]
    return min((size for size in known if size is not None), default=None)


def total_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that there are, or None if the kernel does not say; `root` as in `free_memory`."""
    known = [_meminfo(root).get("MemTotal"), *(limit for limit, _ in _limits(root))]
    return min((size for size in known if size is not None), default=None)


def multiplies_bfloat16(root: Path = _ROOT) -> bool:
    """Return whether the CPU has instructions for bfloat16 products (AVX-512 BF16, AMX, Arm BF16)."""
    try:
        return not _BFLOAT16_FLAGS.isdisjoint((root / "proc/cpuinfo").read_text().split())
    except OSError:
        return False


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError), open(root / "proc/meminfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("MemAvailable", "MemTotal"):
                found[name] = int(value.split()[0]) * 1024
    return found


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use that cannot be reclaimed) of each control group."""
    # A container often sees its own group as the topmost, whatever /proc/self/cgroup says: folders that are not there
    # are passed over, the topmost is always looked at.
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _groups(
                root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            )


def _groups(mount: Path, path: str, limit_file: str, usage_file: str, prefix: str) -> Iterator[tuple[int, int]]:
    group = Path(path.strip("/"))
    for folder in (group, *group.parents):
        if ".." in folder.parts:
            continue
        try:
            limit = int((mount / folder / limit_file).read_text())  # "max" where there is none
            used = int((mount / folder / usage_file).read_text())
        except (OSError, ValueError):
            continue
        yield limit, max(0, used - _of_files(mount / folder / "memory.stat", prefix))


def _of_files(stat: Path, prefix: str) -> int:
    """Bytes that the kernel keeps of files and gives back when memory is short."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    size = 0
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in names:
                size += int(value)
    return size
