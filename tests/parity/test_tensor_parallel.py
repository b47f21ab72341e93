"""Two and four ranks over gloo give what one rank gives: every family, KV heads 4, 2 and 1, any vocabulary."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.cases import CASES, Case
from parity.protocol import assert_equal_logits

TESTS = Path(__file__).parents[1]
# One variant per rule of sharding; what differs only in numbers (rope kinds) is left to the single rank.
SHARDED = [
    key for key in CASES if key[1] not in ("llama3", "yarn", "linear", "no_window") and key != ("qwen3", "windows")
]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, cases: dict[tuple[str, str], Case], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    """The world size, and what each rank computed: all families in one set of processes, which cost seconds each."""
    world_size = request.param
    jobs_file = tmp_path_factory.mktemp(f"world{world_size}") / "jobs.pt"
    torch.save({"-".join(k): (str(cases[k].path), cases[k].sequences) for k in SHARDED}, jobs_file)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "parity.tp_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(port), str(jobs_file)],
            cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return world_size, [torch.load(jobs_file.with_name(f"rank{r}of{world_size}.pt")) for r in range(world_size)]


@pytest.mark.parametrize("key", SHARDED, ids="-".join)
def test_ranks_equal_transformers(
    ranks: tuple[int, list[dict[str, Any]]], cases: dict[tuple[str, str], Case], key: tuple[str, str]
) -> None:
    _, results = ranks
    first = results[0]["jobs"]["-".join(key)]["logits"]
    assert_equal_logits(first, cases[key].logits)
    for other in results[1:]:
        for a, b in zip(first, other["jobs"]["-".join(key)]["logits"], strict=True):
            assert torch.equal(a, b), "ranks must make the same choices"


def test_kv_heads_are_divided_or_replicated(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    world_size, results = ranks
    jobs = results[0]["jobs"]
    assert jobs["llama-mha"]["kv_heads"] == 4 // world_size
    assert jobs["llama-plain"]["kv_heads"] == max(2 // world_size, 1)
    assert jobs["llama-mqa"]["kv_heads"] == 1


def test_collectives(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    world_size, results = ranks
    for result in results:
        assert result["smallest"] == 10 - (world_size - 1)
        assert result["half sum"] == [sum(1.5 + r for r in range(world_size))] * 3
        assert result["gathered"] == [[float(r) for r in range(world_size)]] * 2


def test_a_lost_rank_is_fatal(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    """Rank 0 goes on alone after the others have ended: an error at once, not a wait."""
    assert ranks[1][0]["lost"].startswith("rank 0 lost another rank: ")
    assert "\n" not in ranks[1][0]["lost"]
