"""The options of a group of nodes: what is refused, and what a supervisor's variables fill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.config import GROUP_TLS
from launcher.errors import ArgumentValidation
from launcher.group_config import GroupConfig, check_group, supervisor_variables, with_supervisor

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "leader.svc"}
TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nnodes": 2, "node_rank": 2, "group_token": "t"}, ["--node-rank", "--nnodes", "2 and 2"]),
        ({"node_rank": 1}, ["--node-rank", "1 and 1"]),
        ({"nnodes": 2}, ["--group-token", "--insecure-group"]),
        ({"nnodes": 2, "group_token": ""}, ["--group-token"]),
        ({"nnodes": 2, "group_token": "t", "insecure_group": True}, ["contradict"]),
        ({"nnodes": 2, "node_rank": 1, "group_token": "t"}, ["--master-addr"]),
        ({"node_addr": "10.0.0.1"}, ["--node-addr", "--nnodes"]),
        ({"shard_port": 5}, ["--shard-port", "--nnodes"]),
        ({"insecure_group": True}, ["--insecure-group", "--nnodes"]),
        ({"group_tls_cert": Path("a.pem")}, ["--group-tls-cert", "--nnodes"]),
        (
            {"nnodes": 2, "group_token": "t", "group_tls_cert": Path("a.pem")},
            ["--group-tls-cert", "--group-tls-key", "--group-tls-ca"],
        ),
        (
            {"nnodes": 2, "group_token": "t", **dict.fromkeys(GROUP_TLS, Path("/none.pem"))},
            ["`--group-tls-cert` /none.pem: No such file"],
        ),
    ],
)
def test_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ArgumentValidation) as caught:
        check_group(GroupConfig(**fields))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"group_token": "t"},  # a variable that other launches use
        {"nnodes": 2, "group_token": "t"},
        {"nnodes": 2, "node_rank": 1, "insecure_group": True, "master_addr": "10.0.0.1"},
    ],
)
def test_accepted(fields: dict[str, Any]) -> None:
    check_group(GroupConfig(**fields))


def test_the_variables_of_leader_worker_set() -> None:
    found = with_supervisor(GroupConfig(), LWS)
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == (4, 3, "leader.svc", None)


def test_options_win_over_them() -> None:
    asked = GroupConfig(nnodes=2, node_rank=1, master_addr="10.0.0.1", master_port=7)
    assert with_supervisor(asked, LWS) == asked


def test_one_node_keeps_its_address() -> None:
    found = with_supervisor(GroupConfig(), {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"})
    assert (found.nnodes, found.node_rank, found.master_addr) == (1, 0, "localhost")
    assert with_supervisor(GroupConfig(), {}) == GroupConfig(nnodes=1, node_rank=0)


def test_torchrun_keeps_its_port() -> None:
    found = with_supervisor(GroupConfig(master_addr="10.0.0.1", master_port=29400), TORCHRUN)
    assert (found.nnodes, found.node_rank, found.master_port) == (2, 1, 29401)


def test_a_variable_that_is_no_number() -> None:
    with pytest.raises(ArgumentValidation, match="LWS_GROUP_SIZE"):
        with_supervisor(GroupConfig(), {"LWS_GROUP_SIZE": "many"})


@pytest.mark.parametrize(
    ("config", "environ", "filled"),
    [
        (GroupConfig(), LWS, dict(zip(("--nnodes", "--node-rank", "--master-addr"), LWS, strict=True))),
        (GroupConfig(), TORCHRUN, {"--nnodes": "GROUP_WORLD_SIZE", "--node-rank": "GROUP_RANK"}),
        (GroupConfig(nnodes=2, node_rank=1, master_addr="10.0.0.1"), LWS, {}),
        (GroupConfig(nnodes=1), LWS, {"--node-rank": "LWS_WORKER_INDEX"}),
        (GroupConfig(), {"LWS_LEADER_ADDRESS": "leader.svc", "LWS_GROUP_SIZE": "1"}, {"--nnodes": "LWS_GROUP_SIZE"}),
        (GroupConfig(), {}, {}),
    ],
)
def test_which_variable_filled_which_option(
    config: GroupConfig, environ: dict[str, str], filled: dict[str, str]
) -> None:
    assert supervisor_variables(config, environ) == filled
