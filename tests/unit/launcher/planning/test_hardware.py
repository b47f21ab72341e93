"""What nvidia-smi says, and what CUDA_VISIBLE_DEVICES leaves of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.planning import hardware
from launcher.planning.env_report import cpu_features, report
from launcher.planning.hardware import Gpu, Hardware, detect, parse_query, process_age_s, visible

ANSWER = """\
GPU-aaaa-1, NVIDIA H200, 143771, 9.0
GPU-aabb-2, NVIDIA A100-SXM4-80GB, 81920, 8.0
GPU-cccc-3, Tesla T4, [N/A], [N/A]
No devices were found
"""
GPUS = parse_query(ANSWER)


def test_query() -> None:
    assert (
        Gpu(uuid="GPU-aaaa-1", card="nvidia-h200", memory_mib=143771, compute_capability=(9, 0)),
        Gpu(uuid="GPU-aabb-2", card="nvidia-a100-sxm4-80gb", memory_mib=81920, compute_capability=(8, 0)),
        Gpu(uuid="GPU-cccc-3", card="tesla-t4"),
    ) == GPUS
    assert parse_query("") == ()


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (None, [0, 1, 2]),
        ("all", [0, 1, 2]),
        ("0", [0]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("7", []),
        ("0,0", [0]),
        ("GPU-cccc", [2]),
        ("GPU-aa", []),
        ("GPU-aabb-2, 0", [1, 0]),
    ],
)
def test_visible(selection: str | None, indices: list[int]) -> None:
    assert visible(GPUS, selection) == tuple(GPUS[index] for index in indices)


def test_slices_count_as_devices() -> None:
    chosen = visible(GPUS, "MIG-1,MIG-2")
    assert [gpu.uuid for gpu in chosen] == ["MIG-1", "MIG-2"]
    assert chosen[0].memory_mib is None
    assert visible((), "MIG-1") == ()


def fake_tool(folder: Path, script: str) -> str:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return f"{folder}:{os.environ['PATH']}"


def test_detect_asks_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PATH", fake_tool(tmp_path, "echo 'GPU-1, NVIDIA L4, 23034, 8.9'; echo 'GPU-2, NVIDIA L4, 23034, 8.9'")
    )
    monkeypatch.setattr(hardware, "_is_cpu_build", lambda: False)
    found = detect({"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "6,2"})
    assert found.omp_num_threads == 6
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-2"]
    assert found.cores >= 1 and found.memory_bytes and found.memory_bytes > 2**20
    text = report(found, {"ATTENTION": "paged", "HF_TOKEN": "secret"})
    assert "GPUs: 1" in text and "ATTENTION=paged" in text and "torch 2." in text
    assert "secret" not in text


def test_gpus_are_not_counted_for_a_torch_that_cannot_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the launcher would plan a shard for each, and all of them would end up on the CPU."""
    monkeypatch.setenv("PATH", fake_tool(tmp_path, "echo 'GPU-1, NVIDIA L4, 23034, 8.9'"))
    monkeypatch.setattr(hardware, "_is_cpu_build", lambda: True)
    found = detect({})
    assert (found.gpus, found.unused_gpus) == ((), 1)
    assert "torch is built for CPUs only" in report(found, {})


@pytest.mark.parametrize(("version", "expected"), [("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False)])
def test_what_torch_was_built_for(version: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert hardware._is_cpu_build() is expected


def test_a_failing_tool_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_tool(tmp_path, "echo 'GPU-1, NVIDIA L4, 23034, 8.9'; exit 9"))
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        assert detect({}).gpus == ()


def test_report_without_anything() -> None:
    text = report(Hardware(), {})
    assert "GPUs: 0" in text and "memory N/A" in text and "Variables: none set" in text


def test_the_report_tells_variables_and_hides_secrets() -> None:
    environ = {
        "API_KEY": "s3cret", "NGROK_AUTHTOKEN": "s3cret", "HF_TOKEN": "s3cret", "HUGGING_FACE_HUB_TOKEN": "s3cret",
        "HF_API_TOKEN": "s3cret", "MY_TOKEN": "s3cret", "MAX_TOTAL_TOKENS": "77", "NCCL_DEBUG": "INFO",
        "HF_HUB_OFFLINE": "1", "SOMETHING": "else", "GIT_SHA": "abc123", "DOCKER_LABEL": "sha-abc",
    }  # fmt: skip
    text = report(Hardware(), environ)
    assert "s3cret" not in text and "MY_TOKEN" not in text and "SOMETHING" not in text
    for part in ("API_KEY=<hidden>", "HF_TOKEN=<hidden>", "MAX_TOTAL_TOKENS=77", "NCCL_DEBUG=INFO", "HF_HUB_OFFLINE=1"):
        assert part in text
    assert "Git sha: abc123" in text and "Docker label: sha-abc" in text


def test_the_report_tells_the_cache_and_its_disk(tmp_path: Path) -> None:
    text = report(Hardware(), {"HF_HUB_CACHE": str(tmp_path)})
    assert f"Hub cache: {tmp_path} (" in text and "GiB free)" in text
    assert "not there yet" in report(Hardware(), {"HF_HUB_CACHE": str(tmp_path / "later")})


def test_instructions_of_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("model name: x\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16\n")
    (tmp_path / "arm").write_text("Features\t: fp asimd i8mm bf16 sve\n")
    assert cpu_features(tmp_path / "x86") == ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"]
    assert cpu_features(tmp_path / "arm") == ["neon", "bf16", "i8mm", "sve"]
    assert cpu_features(tmp_path / "none") == []


def test_the_report_does_not_import_torch() -> None:
    program = (
        "import os, sys; from launcher.planning import env_report, hardware;"
        "env_report.report(hardware.detect(os.environ), os.environ); sys.exit(int('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_process_age() -> None:
    assert 0.0 < process_age_s() < 3600.0
