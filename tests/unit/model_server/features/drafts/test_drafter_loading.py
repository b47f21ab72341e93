"""What `--speculator` and its options are refused for, before anything is loaded, and how Info calls what drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_server.errors import StartupError
from model_server.features.drafts.load import FoundSpeculator, can_draft, check_window_rows
from model_server.runner.runner import RunnerTraits
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
    ("speculator", "speculate", "named"),
    [
        (None, 5, "`--speculate 5`"),
        ("mtp", None, "`--speculator mtp`"),
        ("mtp", 2, "`--speculator mtp` and `--speculate 2`"),
    ],
)
def test_a_model_with_a_state_per_request_drafts_nothing(
    speculator: str | None, speculate: int | None, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    stateful = RunnerTraits(state_bytes=1)
    assert can_draft(RunnerTraits(), speculator, speculate, 64) and not caplog.messages
    assert not can_draft(stateful, speculator, speculate, None)
    assert [message.partition(":")[0] for message in caplog.messages] == [named]
    with pytest.raises(StartupError, match=r"--speculate-max-rows 64: nothing is drafted.*keeps a state.*leave it out"):
        can_draft(stateful, speculator, speculate, 64)


def test_what_nobody_asks_for_is_not_drafted(caplog: pytest.LogCaptureFixture) -> None:
    for traits in (RunnerTraits(), RunnerTraits(state_bytes=1)):
        assert not can_draft(traits, None, None, None) and not can_draft(traits, None, 0, None)
    assert not caplog.messages


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
