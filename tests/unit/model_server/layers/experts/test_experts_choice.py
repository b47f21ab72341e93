"""Which way to run experts a device gets."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from model_server.layers.experts import choice
from model_server.layers.experts.choice import make_experts
from model_server.layers.experts.experts import ExpertWeights
from model_server.layers.experts.grouped import GroupedExperts
from model_server.layers.experts.visited import VisitedExperts
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.forms import Plain


@pytest.mark.parametrize(("device", "grouped"), [("cpu", False), ("meta", True)])
def test_who_is_chosen(device: str, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernels of ours run: a CPU visits the experts, another device has torch's grouped product."""
    monkeypatch.setattr(choice, "usable", lambda device: False)
    weights = [ExpertWeights(Plain(torch.empty(8, 4, device=device)), Plain(torch.empty(4, 4, device=device)))] * 2
    made = make_experts(weights, len(weights), silu, LinearFactory(torch.device(device), torch.float32))
    assert isinstance(
        made, GroupedExperts if grouped and hasattr(torch.nn.functional, "grouped_mm") else VisitedExperts
    )
