"""Options of node 0 on another node."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.nodes.shared_options import merged, to_words

LEADER = LauncherConfig(
    model_id="demo", nnodes=2, node_rank=0, num_shard=2, sharded=True, cuda_graphs=[1, 2], cors_allow_origin=["a", "b"],
    cuda_memory_fraction=0.5, disable_grammar_support=True, tokenizer_config_path=Path("a.json"), api_key="key",
    group_token="secret", json_output=True, port=8080,
)  # fmt: skip


def test_a_worker_takes_the_leaders_options_and_keeps_its_own() -> None:
    own = LauncherConfig(nnodes=2, node_rank=1, master_addr="10.0.0.1", group_token="secret", log_level="debug")
    config = merged(own, to_words(LEADER), "node 0")
    for name in ("model_id", "num_shard", "sharded", "cuda_graphs", "cors_allow_origin", "cuda_memory_fraction",
                 "disable_grammar_support", "port"):  # fmt: skip
        assert getattr(config, name) == getattr(LEADER, name), name
    assert (config.node_rank, config.master_addr, config.log_level, config.json_output) == (
        1,
        "10.0.0.1",
        "debug",
        False,
    )
    assert config.tokenizer_config_path is None  # the router's, which this node does not have


def test_no_secret_is_handed_on() -> None:
    assert not {"key", "secret"} & set(to_words(LEADER))


def test_the_same_option_on_both_is_no_contradiction() -> None:
    own = LauncherConfig(nnodes=2, node_rank=1, model_id="demo", port=8080)
    assert merged(own, to_words(LEADER), "node 0").port == 8080


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (
            LauncherConfig(nnodes=2, model_id="other"),
            "`--model-id` other .* contradicts node 0, which has demo",
        ),
        (
            LauncherConfig(nnodes=2, dtype="float16"),
            "`--dtype` float16 .* contradicts node 0, which does not have it",
        ),
    ],
)
def test_an_option_that_contradicts_the_leader_is_refused_by_name(own: LauncherConfig, said: str) -> None:
    with pytest.raises(ArgumentValidation, match=said):
        merged(own, to_words(LEADER), "node 0")
