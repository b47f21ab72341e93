"""Faults of each kind, planted on purpose: the stand-in sees them. Beside each is the same without the fault."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_in import queued
from stand_in.counters import counted, faults
from support.graph_doubles import FakeEvent
from support.running_server import free_port

from model_server.memory.transfer import Staging, download
from model_server.runner.graph_capture import CudaGraphCapture

pytestmark = [pytest.mark.short, pytest.mark.faulty]

CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _faults_of(work: Callable[[], object]) -> dict[str, int]:
    with counted() as grown:
        work()
        torch.cuda.synchronize()
    return faults(grown)


# ---- A missing wait


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_that_is_read_before_its_copy_is_over(waits: bool, order: str) -> None:
    values = torch.arange(100, device=CARD) * 3
    on_host = download(values)
    event = torch.cuda.Event()
    event.record()
    if waits:
        event.synchronize()
    read = on_host.tolist()
    torch.cuda.synchronize()
    assert on_host.tolist() == list(range(0, 300, 3))
    if waits or order == "late":  # a device that is ahead may be lucky
        assert (read == on_host.tolist()) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another(waits: bool) -> None:
    factor = 3.0 + waits  # memory that was freed holds the numbers of the test before
    values = torch.arange(100, dtype=torch.float32, device=CARD) * factor
    other = torch.cuda.Stream(CARD)
    if waits:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        doubled = values * 2
        on_host = download(doubled)
    other.synchronize()
    assert (on_host.tolist() == [2 * factor * n for n in range(100)]) == waits


def test_memory_that_nothing_has_written_is_no_number() -> None:
    torch.full((100,), 1.0, device=CARD)  # freed at once: its memory is the next one's
    fresh = torch.empty(100, device=CARD)
    assert bool((fresh + 1).isnan().all())


# ---- A pinned buffer that is used again too early


@pytest.mark.parametrize("event", [torch.cuda.Event, FakeEvent], ids=["waits", "does-not"])
def test_a_buffer_that_is_written_while_it_is_copied(event: type) -> None:
    staging = Staging(CARD, new_event=event)

    def upload_often() -> None:
        for number in range(8):
            staging.upload(np.full(10, number))

    seen = _faults_of(upload_often)
    assert set(seen) == (set() if event is torch.cuda.Event else {"CHANGED_SOURCES"})


def test_a_buffer_that_is_written_while_a_copy_to_it_is_queued() -> None:
    on_host = torch.empty(100, dtype=torch.int64, pin_memory=True)
    values = torch.arange(100, device=CARD)

    def write_too_early() -> None:
        on_host.copy_(values, non_blocking=True)
        on_host[3] = 5

    assert _faults_of(write_too_early) == {"CHANGED_TARGETS": 1}


# ---- What a capture forbids


def _captured(work: Callable[[], object]) -> None:
    capture = CudaGraphCapture(CARD)
    values = torch.ones(64, device=CARD)
    total = torch.empty_like(values)

    def step() -> None:
        work()
        torch.add(values, 1, out=total)

    capture.warm_up(step)
    graph = capture.capture(step)
    total.zero_()
    graph.replay()
    assert total.tolist() == [2.0] * 64


def _asks_the_device() -> None:
    bool(torch.ones(1, device=CARD).any())


def _waits_for_the_device() -> None:
    torch.cuda.synchronize()


def _uploads_from_pageable_memory() -> None:
    torch.ones(4).to(CARD, non_blocking=True)


def _allocates_pinned_memory() -> None:
    """As a library does that calls the runtime itself."""
    address = ctypes.c_void_p()
    status = ctypes.CDLL("libcudart.so.13").cudaHostAlloc(ctypes.byref(address), 1 << 20, 0)
    if status:
        raise RuntimeError(f"cudaHostAlloc: {status}")


def _allocates_device_memory() -> None:
    address = ctypes.c_void_p()
    status = ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(address), ctypes.c_size_t(1 << 20))
    if status:
        raise RuntimeError(f"cudaMalloc: {status}")


def test_a_capture_without_a_fault() -> None:
    assert _faults_of(lambda: _captured(lambda: torch.ones(8, device=CARD).sum())) == {}


@pytest.mark.parametrize(
    "work",
    [
        _asks_the_device,
        _waits_for_the_device,
        _allocates_pinned_memory,
        _allocates_device_memory,
    ],
)
def test_a_capture_of_what_it_forbids(work: Callable[[], object]) -> None:
    def capture() -> None:
        with pytest.raises(RuntimeError):
            _captured(work)

    assert "FORBIDDEN" in _faults_of(capture)


def test_a_capture_that_uploads_pageable_memory() -> None:
    """torch itself refuses it."""
    with pytest.raises(RuntimeError, match="pinned"):
        _captured(_uploads_from_pageable_memory)


def test_work_on_another_stream_in_a_capture() -> None:
    other = torch.cuda.Stream(CARD)
    values = torch.ones(4, device=CARD)

    def elsewhere() -> None:
        with torch.cuda.stream(other):
            values.add_(1)

    assert "OUTSIDE_CAPTURE" in _faults_of(lambda: _captured(elsewhere))


def test_a_stream_that_joins_a_capture_and_is_not_joined_back() -> None:
    other = torch.cuda.Stream(CARD)

    def forks() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.ones(4, device=CARD)

    def capture() -> None:
        with pytest.raises(RuntimeError):
            _captured(forks)

    assert "FORBIDDEN" in _faults_of(capture)


def test_a_launch_that_a_card_refuses() -> None:
    """More than 65,535 programs on the second axis."""
    from model_server.kernels.trial import write_constant

    out = torch.zeros(1, dtype=torch.int32, device=CARD)
    with pytest.raises(RuntimeError, match="Triton Error"):
        write_constant[(1, 65536)](out, VALUE=7)


# ---- A rank that goes ahead

_RANK = """
import os, sys
import torch
from model_server.device import enter, resolve_device
from model_server.distributed.group import connect
from stand_in.counters import counts, faults

rank, port, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device = resolve_device(rank, 2)
group = connect(rank, 2, device, port=port, timeout_s=60, one_shot=False)
with enter(device):
    total = group.all_reduce(torch.full((4,), rank + 1.0, device=device)).tolist()
    assert total == [3.0] * 4, total
    if way == "other-size":  # a step ahead, of another batch
        group.all_reduce(torch.ones(4 + 4 * rank, device=device))
    elif way == "another-more" and rank == 1:
        group.all_reduce(torch.ones(4, device=device))
    torch.cuda.synchronize()
print("faults", faults(counts()), flush=True)
group.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("way", "seen"),
    [
        ("together", ["faults {}"] * 2),
        ("other-size", ["faults {'PARTED_RANKS': 1}"] * 2),
        ("another-more", ["faults {}", "faults {'PARTED_RANKS': 1}"]),
    ],
)
def test_a_rank_that_goes_ahead(way: str, seen: list[str]) -> None:
    port = str(free_port())
    environ = {**os.environ, "FAKE_CARD_DEVICES": "2", "FAKE_CARD_MEET_S": "5", "FAKE_CARD_REPORT": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _RANK, str(rank), port, way],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [text.strip().splitlines()[-1] for text in said] == seen


# ---- What Python computes


def test_an_operator_that_fails_is_told() -> None:
    def fails() -> None:
        raise ValueError("planted")

    queued.enqueue(fails)
    torch.cuda.synchronize()
    assert any("planted" in error for error in queued.errors)


def test_a_device_that_is_lost(tmp_path: Path) -> None:
    """Every call fails after it, as after an illegal address; in a process of its own."""
    code = (
        "import sys, torch\nx = torch.ones(4, device='cuda')\n"
        "x = x + 1\ntorch.cuda.synchronize()\nopen(sys.argv[1], 'w').close()\nx = x + 1\n"
        "try:\n    torch.cuda.synchronize()\nexcept RuntimeError as error:\n    print(error)\n"
    )
    file = str(tmp_path / "break")
    environ = {**os.environ, "FAKE_CARD_BREAK": file, "FAKE_CARD_KERNELS": "none"}
    ran = subprocess.run([sys.executable, "-c", code, file], env=environ, capture_output=True, text=True, timeout=300)
    assert "illegal memory access" in ran.stdout + ran.stderr


def test_memory_that_is_short() -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device=CARD)
