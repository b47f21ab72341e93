"""`--placement ray`: what is refused before Ray is asked."""

from __future__ import annotations

import sys

import pytest

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.group_config import GroupConfig, check_placement
from launcher.launch import run_launch


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (GroupConfig(placement="ray", nnodes=2, node_rank=0), "--node-rank"),
        (GroupConfig(placement="ray", nnodes=2, node_addr="10.0.0.1"), "--node-addr"),
        (GroupConfig(placement="ray", nnodes=2, master_addr="10.0.0.1"), "--master-addr"),
        (GroupConfig(placement="ray", nnodes=2, group_token="a", insecure_group=True), "--insecure-group"),
    ],
)
def test_what_ray_chooses_may_not_be_given(config: GroupConfig, flag: str) -> None:
    with pytest.raises(ArgumentValidation, match=flag):
        check_placement(config)


def test_the_rest_may() -> None:
    check_placement(GroupConfig(placement="ray", nnodes=2, master_port=7, group_token="a", shard_port=9))


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "launcher.placement.ray_nodes", raising=False)
    assert run_launch(LauncherConfig(model_id="demo", placement="ray", nnodes=2), {}) == 1
    assert "`--placement ray` needs Ray: pip install 'tercet[ray]'" in capfd.readouterr().err
