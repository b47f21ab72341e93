"""Where kernels run: a trial decides on a GPU, and a failed one is explained once."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from model_server.attention.choice import AttentionChoice
from model_server.kernels import availability
from model_server.kernels.availability import refusal, usable
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.torch import TorchFused

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    refusal.cache_clear()
    yield
    refusal.cache_clear()


@pytest.fixture
def with_trial(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[torch.device]]:
    """A GPU and a Triton whose first kernel ends as asked; the devices that it was launched on."""

    def given(
        error: Exception | None = None, capability: tuple[int, int] = (9, 0), interpreted: bool = False
    ) -> list[torch.device]:
        launched: list[torch.device] = []

        def launch(device: torch.device) -> None:
            launched.append(device)
            if error is not None:
                raise error

        trial = SimpleNamespace(INTERPRETED=interpreted, launch=launch)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(availability, "_trial", lambda: trial)
        return launched

    return given


def test_a_kernel_that_runs(with_trial: Callable[..., list[torch.device]], caplog: pytest.LogCaptureFixture) -> None:
    launched = with_trial()
    assert usable(GPU) and usable(GPU)
    assert launched == [GPU], "the trial is made once"
    assert not caplog.records


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set ...\nmore"),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        OSError("no space left"),
    ],
    ids=["compiler", "headers", "other"],
)
def test_a_host_that_cannot_compile(
    error: Exception, with_trial: Callable[..., list[torch.device]], caplog: pytest.LogCaptureFixture
) -> None:
    launched = with_trial(error)
    assert not usable(GPU)
    with pytest.raises(Exception, match=f"triton cannot be used: .*{type(error).__name__}"):
        AttentionChoice("triton", GPU, torch.bfloat16)
    assert isinstance(fused_for(GPU, torch.bfloat16), TorchFused)
    assert launched == [GPU]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for expected in ("install gcc and python3-dev", "torch's own operators", type(error).__name__):
        assert expected in record.getMessage()
    assert "\n" not in record.getMessage()


def test_memory_that_is_out_is_no_missing_compiler(with_trial: Callable[..., list[torch.device]]) -> None:
    with_trial(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        usable(GPU)


def test_old_gpus_are_not_tried(with_trial: Callable[..., list[torch.device]]) -> None:
    launched = with_trial(capability=(7, 5))
    assert refusal(GPU) == "the GPU's compute capability is below 8.0"
    assert launched == []


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_cpu_needs_the_interpreter(with_trial: Callable[..., list[torch.device]], interpreted: bool) -> None:
    launched = with_trial(interpreted=interpreted)
    assert usable(CPU) is interpreted
    assert not usable(torch.device("mps"))
    assert launched == []


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(GPU) == "Triton is not installed"
