"""Memory shared by name between a machine's processes, for megabytes without copies or a waiting event loop."""

from __future__ import annotations

import os
import re
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{1,10}):(\d{1,10}):([0-9a-f]{32})")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedMemory:
    """Bytes that go with the last object, of any process, that refers to them."""

    __slots__ = ("__weakref__", "_descriptor", "name")

    def __init__(self, descriptor: int, name: str) -> None:
        """Takes over the descriptor. See `create` and `open`."""
        self._descriptor = descriptor
        # For the same user's processes in the same `process_namespace`, while its maker has it.
        self.name = name
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def create(cls) -> SharedMemory:
        """Empty. Raises OSError, as when no more files may be open."""
        label = secrets.token_hex(16)
        descriptor = os.memfd_create(label)
        return cls(descriptor, f"{os.getpid()}:{descriptor}:{label}")

    @classmethod
    def open(cls, name: str) -> SharedMemory:
        """Another process'. Raises ValueError for what is no name, OSError if there is none of this name."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError("not a name of shared memory")
        pid, number, label = found.groups()
        # The number may be that of another file by now, of a pipe without a reader among them.
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        memory = cls(descriptor, name)
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{label} (deleted)":
            raise FileNotFoundError("the shared memory is gone")
        return memory

    def write(self, offset: int, data: bytes) -> None:
        """Raises OSError where memory is short."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            offset += written
            rest = rest[written:]

    def read(self, offset: int, length: int) -> bytearray:
        """A copy. Raises OSError where there are fewer bytes."""
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            count = os.preadv(self._descriptor, [rest], offset)
            if not count:
                raise OSError("the shared memory is shorter")
            offset += count
            rest = rest[count:]
        return data


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """A part of shared memory."""

    memory: SharedMemory
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length

    def read(self) -> bytearray:
        """A copy. Raises OSError."""
        return self.memory.read(self.offset, self.length)


def process_namespace() -> str:
    """Return what is equal for processes of one user, machine start and container; empty if unknown."""
    try:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
        return " ".join([_BOOT_ID.read_text().strip(), *spaces, f"uid:[{os.geteuid()}]"])
    except OSError:
        return ""
