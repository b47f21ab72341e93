"""Memory and features of a machine, as its kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.host.machine import free_memory, multiplies_bfloat16, total_memory

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lines = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {40 * 2**20} kB\nHugePages_Total: 0\n"
    write(tmp_path, {"proc/meminfo": lines})
    return tmp_path


def group(folder: str, limit: str, used: int, of_files: int = 0) -> dict[str, str]:
    """A control group of version 2."""
    stat = f"anon 1\ninactive_file {of_files // 2}\nactive_file {of_files - of_files // 2}\nslab 7\n"
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}memory.stat": stat,
    }


def test_a_machine_without_limits(root: Path) -> None:
    assert (total_memory(root), free_memory(root)) == (64 * GIB, 40 * GIB)
    write(root, {"proc/self/cgroup": "0::/user.slice\n"} | group("user.slice/", "max", 30 * GIB))
    assert (total_memory(root), free_memory(root)) == (64 * GIB, 40 * GIB)


def test_a_container_has_what_its_limit_leaves(root: Path) -> None:
    """What the kernel keeps of files is given back when memory is short."""
    write(root, {"proc/self/cgroup": "0::/\n"} | group("", str(8 * GIB), 6 * GIB, of_files=3 * GIB))
    assert (total_memory(root), free_memory(root)) == (8 * GIB, 5 * GIB)
    write(root, group("", str(8 * GIB), 9 * GIB))
    assert free_memory(root) == 0


def test_the_groups_above_count_too(root: Path) -> None:
    write(
        root,
        {"proc/self/cgroup": "0::/pods/one/shard\n"}
        | group("pods/one/shard/", "max", GIB)
        | group("pods/one/", str(16 * GIB), 2 * GIB)
        | group("pods/", str(32 * GIB), 30 * GIB),
    )
    assert (total_memory(root), free_memory(root)) == (16 * GIB, 2 * GIB)


def test_a_container_whose_group_has_its_path_outside(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/docker/0123\n"} | group("", str(4 * GIB), GIB))
    assert (total_memory(root), free_memory(root)) == (4 * GIB, 3 * GIB)
    write(root, {"proc/self/cgroup": "0::/../..\n"})
    assert total_memory(root) == 4 * GIB


def test_control_groups_of_version_1(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "12:pids:/docker/0123\n5:cpu,memory:/docker/0123\n0::/docker/0123\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{10 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"active_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
        },
    )
    assert (total_memory(root), free_memory(root)) == (10 * GIB, 8 * GIB)
    write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert (total_memory(root), free_memory(root)) == (64 * GIB, 40 * GIB)


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert (total_memory(tmp_path), free_memory(tmp_path)) == (None, None)
    assert total_memory() is not None  # this one's does


def test_instructions_for_bfloat16(tmp_path: Path) -> None:
    assert not multiplies_bfloat16(tmp_path)
    for line, expected in (
        ("flags : fpu avx512f avx512_bf16", True),
        ("flags : fpu amx_bf16", True),
        ("Features : fp asimd bf16", True),
        ("flags : avx512f notbf16", False),
    ):
        write(tmp_path, {"proc/cpuinfo": f"{line}\n"})
        assert multiplies_bfloat16(tmp_path) is expected
