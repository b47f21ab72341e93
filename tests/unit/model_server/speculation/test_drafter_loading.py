"""What `--speculator` and its options are refused for, before anything is loaded, and how Info calls what drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_server.errors import StartupError
from model_server.speculation.loading import FoundSpeculator, check_window_rows
from wire.speculation.heads import Heads, SpeculatorKind


@pytest.mark.parametrize(
    ("num_drafted", "device", "reason"), [(0, "cuda", "nothing is drafted"), (3, "cpu", "for GPUs")]
)
def test_a_bound_of_nothing_is_refused(num_drafted: int, device: str, reason: str) -> None:
    check_window_rows(None, num_drafted, torch.device(device))
    check_window_rows(64, 3, torch.device("cuda"))
    with pytest.raises(StartupError, match=f"--speculate-max-rows 64.*{reason}.*leave it out"):
        check_window_rows(64, num_drafted, torch.device(device))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "draft_model"),
        ({"is_mtp": True}, "mtp"),
        ({"is_eagle": True}, "eagle3"),
        ({"heads": Heads(SpeculatorKind.MEDUSA, None, 3)}, "medusa"),
        ({"heads": Heads(SpeculatorKind.MLP, None, 3)}, "mlp_speculator"),
    ],
)
def test_what_info_says_of_each_kind(fields: dict[str, object], kind: str) -> None:
    assert FoundSpeculator("x", Path(), {}, **fields).kind == kind  # type: ignore[arg-type]
