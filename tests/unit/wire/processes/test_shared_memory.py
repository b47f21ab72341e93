"""Memory that processes share: found by its name only, and gone with the last that refers to it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wire.processes.shared_memory import SharedBytes, SharedMemory, process_namespace


def test_another_process_reads_and_writes_it() -> None:
    memory = SharedMemory.create()
    memory.write(3, b"hello")
    code = (
        "import sys; from wire.processes.shared_memory import SharedMemory, process_namespace\n"
        "memory = SharedMemory.open(sys.argv[1])\n"
        "memory.write(8, bytes(memory.read(3, 5)).upper())\n"
        "print(process_namespace())"
    )
    done = subprocess.run([sys.executable, "-c", code, memory.name], check=True, capture_output=True, text=True)
    assert memory.read(0, 13) == b"\0\0\0helloHELLO"
    assert done.stdout.strip() == process_namespace() != ""
    part = SharedBytes(memory, 8, 5)
    assert len(part) == 5 and part.read() == b"HELLO"


def test_what_is_shorter_is_an_error() -> None:
    memory = SharedMemory.create()
    memory.write(0, b"abc")
    with pytest.raises(OSError, match="shorter"):
        memory.read(1, 3)


def test_it_stays_for_those_that_have_opened_it() -> None:
    memory = SharedMemory.create()
    memory.write(0, b"abc")
    opened = SharedMemory.open(memory.name)
    name = memory.name
    del memory
    assert opened.read(0, 3) == b"abc"
    with pytest.raises(OSError, match=r".*"):
        SharedMemory.open(name)


def test_another_file_under_its_number_is_not_taken_for_it() -> None:
    """A pipe without a writer would block as well."""
    reading, writing = os.pipe()
    other = SharedMemory.create()
    label = other.name.rpartition(":")[2]
    try:
        for number in (reading, other.name.split(":")[1]):
            changed = f"{os.getpid()}:{number}:{'0' * len(label)}"
            with pytest.raises(OSError, match=r".*"):
                SharedMemory.open(changed)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("name", ["", "1:2", "1:2:xyz", "1:2:../../etc/passwd", "-1:2:" + "0" * 32, "/etc/passwd"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        SharedMemory.open(name)


def test_another_user_is_in_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this one's processes have is not his to open."""
    own = process_namespace()
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert process_namespace() not in ("", own)
