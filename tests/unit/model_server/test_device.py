"""Device, dtype and thread rules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from model_server import device as rules
from model_server.device import (
    SMALL_MODEL_BYTES,
    available_cpus,
    enter,
    resolve_device,
    resolve_dtype,
    tune,
)
from model_server.errors import StartupError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LARGE = SMALL_MODEL_BYTES


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_requested_dtype_is_taken(name: str, device: torch.device) -> None:
    assert resolve_dtype(name, device) == getattr(torch, name)


def test_unknown_dtype() -> None:
    with pytest.raises(StartupError, match="--dtype int8 is unknown; choose one of float16, bfloat16, float32"):
        resolve_dtype("int8", CPU)


@pytest.mark.parametrize(
    ("stored", "needs_bfloat16", "capability", "wanted"),
    [
        ("BF16", False, (9, 0), torch.bfloat16),
        ("F16", False, (9, 0), torch.float16),
        ("F16", True, (9, 0), torch.bfloat16),  # its activations overflow in float16
        ("F32", False, (8, 0), torch.bfloat16),
        (None, False, (8, 0), torch.bfloat16),
        ("BF16", False, (7, 5), torch.float16),
        ("BF16", True, (7, 5), torch.float16),
    ],
)
def test_default_dtype_on_a_gpu(
    stored: str | None,
    needs_bfloat16: bool,
    capability: tuple[int, int],
    wanted: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype(None, GPU, stored, needs_bfloat16=needs_bfloat16) == wanted
    assert resolve_dtype("float16", GPU, stored, needs_bfloat16=needs_bfloat16) == torch.float16


@pytest.mark.parametrize(
    ("stored", "has_instructions", "operators", "is_native", "wanted"),
    [
        ("BF16", True, True, True, torch.bfloat16),
        ("BF16", True, False, True, torch.bfloat16),
        ("BF16", True, True, False, torch.bfloat16),
        ("BF16", False, True, True, torch.bfloat16),
        ("BF16", False, False, True, torch.float32),  # torch's own product of bfloat16 is slow there
        ("BF16", False, True, False, torch.float32),
        ("F16", True, True, True, torch.bfloat16),
        ("F16", False, True, True, torch.float32),
        ("F32", True, True, True, torch.float32),
        ("F64", True, True, True, torch.float32),
        (None, True, True, True, torch.float32),
    ],
)
def test_default_dtype_on_a_cpu(
    stored: str | None,
    has_instructions: bool,
    operators: bool,
    is_native: bool,
    wanted: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "multiplies_bfloat16", lambda: has_instructions)
    monkeypatch.setattr(rules, "usable", lambda device, dtype: operators and dtype == torch.bfloat16)
    assert resolve_dtype(None, CPU, stored, is_native=is_native) == wanted
    assert resolve_dtype(None, CPU, stored, is_native=is_native, needs_bfloat16=True) == wanted


@pytest.mark.parametrize(("quota", "wanted"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("", 8)])
def test_available_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, wanted: int) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    monkeypatch.setattr(rules, "CPU_QUOTA", path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert available_cpus() == wanted


def test_threads_are_shared_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "available_cpus", lambda: 2)
    before = torch.get_num_threads()
    try:
        assert tune(CPU, 1, LARGE) == 2
        assert tune(CPU, 2, LARGE) == 1
        assert tune(CPU, 4, LARGE) == 1
        assert tune(CPU, 1, LARGE - 1) == 1  # a small model leaves a CPU to the router
        assert tune(GPU, 1, LARGE) == 1  # nothing changes
        assert tune(CPU, 1, LARGE, keep_threads=True) == 1  # the user's business: left alone
    finally:
        torch.set_num_threads(before)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(3, 4) == CPU
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert resolve_device(1, 2) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(StartupError, match="4 shards need 4 GPUs; visible: 2; lower --num-shard"):
        resolve_device(0, 4)


def test_the_computing_thread_takes_its_device_and_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in (CPU, torch.device("cuda", 1)):
        with enter(device):
            assert torch.is_inference_mode_enabled()
    assert chosen == [torch.device("cuda", 1)]
