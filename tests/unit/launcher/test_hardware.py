"""What nvidia-smi says, and what CUDA_VISIBLE_DEVICES leaves of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launcher.env_report import report
from launcher.hardware import Gpu, Hardware, detect, parse_query, process_age_s, visible

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
    found = detect({"CUDA_VISIBLE_DEVICES": "1"})
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-2"]
    assert found.cores >= 1 and found.memory_bytes and found.memory_bytes > 2**20
    text = report(found, {"ATTENTION": "paged", "HF_TOKEN": "secret"})
    assert "GPUs: 1" in text and "ATTENTION=paged" in text and "torch 2." in text
    assert "secret" not in text


def test_a_failing_tool_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_tool(tmp_path, "echo 'GPU-1, NVIDIA L4, 23034, 8.9'; exit 9"))
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        assert detect({}).gpus == ()


def test_report_without_anything() -> None:
    text = report(Hardware(), {})
    assert "GPUs: 0" in text and "memory N/A" in text and "none set" in text


def test_process_age() -> None:
    assert 0.0 < process_age_s() < 3600.0
