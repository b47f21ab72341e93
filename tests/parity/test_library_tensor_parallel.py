"""transformers' own tensor parallelism under the paged runner: equal to one rank, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity.library import LibraryCase, make_case
from parity.protocol import assert_equal_logits
from parity.ranks import run_ranks

# `make test` has one such model, served by two shards (tests/e2e/test_runners.py).
pytestmark = pytest.mark.parity

EQUAL = ("olmo", "granitemoe", "glm4", "t5", "umt5", "bart")
REFUSED = {
    "jetmoe": "transformers has no tensor-parallel plan for jetmoe: use --num-shard 1",
    "rwkv": "rwkv needs a state for each request (its layers are recurrent), which cannot be divided among shards: "
    "use --num-shard 1",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LibraryCase]:
    return {t: make_case(t, tmp_path_factory.mktemp(t)) for t in (*EQUAL, *REFUSED)}


@pytest.fixture(scope="module")
def two_ranks(cases: dict[str, LibraryCase], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    jobs = {name: (str(case.path), case.sequences) for name, case in cases.items()}
    return run_ranks(2, jobs, tmp_path_factory.mktemp("two"), timeout_s=150)


@pytest.mark.parametrize("model_type", EQUAL)
def test_two_ranks_equal_transformers(
    two_ranks: list[dict[str, Any]], cases: dict[str, LibraryCase], model_type: str
) -> None:
    for rank in two_ranks:
        assert_equal_logits(rank[model_type], cases[model_type].logits)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_divided_is_refused_on_every_rank(two_ranks: list[dict[str, Any]], model_type: str) -> None:
    assert [rank[model_type] for rank in two_ranks] == [REFUSED[model_type]] * 2


def test_key_heads_that_do_not_divide_are_refused_before_loading(cases: dict[str, LibraryCase], tmp_path: Path) -> None:
    from model_server.errors import StartupError
    from model_server.models.hf.loading import check_sharding, find_classes
    from model_server.models.model import describe
    from model_server.weights.checkpoint import examine

    path = cases["glm4"].path
    found = find_classes(describe(examine(path)), trust_remote_code=False)
    with pytest.raises(StartupError, match=r"`num_key_value_heads` \(2\) cannot be divided among 4 shards"):
        check_sharding(found, 4)
