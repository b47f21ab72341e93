"""What the launcher is told of torch and its GPUs."""

from __future__ import annotations

import warnings

import pytest
import torch

from model_server.device_probe import probe


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe() == {
        "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": 0, "reason": None, "triton": None,
    }  # fmt: skip


def test_a_driver_that_is_too_old_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("the driver is too old\nmore of it", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert probe()["reason"] == "the driver is too old"


def test_what_triton_says_of_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("model_server.device_probe.refusal", lambda device: f"no compiler for {device}")
    assert (probe()["gpus"], probe()["triton"]) == (2, "no compiler for cuda:0")
