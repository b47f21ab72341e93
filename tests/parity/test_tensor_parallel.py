"""Two and four ranks over gloo give what one rank gives: every family, KV heads 4, 2 and 1, any vocabulary."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.cases import CASES, REPRESENTATIVE, Cases, Key
from parity.protocol import assert_equal_logits, run_protocol
from parity.tp_worker import E4M3, FLOAT8_JOBS
from support.loading import load
from support.thread_ranks import on_ranks

from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Layout, Ranks
from model_server.runner.runner import Runner

TESTS = Path(__file__).parents[1]
# Variants that differ only in numbers (rope kinds) or in names are left to the single rank.
_SINGLE = ("llama3", "yarn", "linear", "longrope", "no_window", "no_caps", "no_prefix")
SHARDED = [key for key in CASES if key[1] not in _SINGLE and key != ("qwen3", "windows")]
# Every layer reads vectors of the tokens.
UNSTAGED = (("gemma4_text", "plain"),)
# Six heads on four ranks cannot be divided.
WORLDS = [(size, key) for size in (2, 4) for key in SHARDED if size == 2 or "six_heads" not in key[1]]

# Four ranks on two cores take half a minute to meet and to end: `make parity` has them.
LONG = pytest.mark.parity
SIZES = [2, pytest.param(4, marks=LONG)]


class Worlds:
    """What each rank computed, by world size: all families in one set of processes, which cost seconds each."""

    def __init__(self, cases: Cases, keys: set[tuple[int, Key]], root: Path) -> None:
        self._cases = cases
        self._keys = keys
        self._root = root
        self._results: dict[int, list[dict[str, Any]] | Exception] = {}

    def __getitem__(self, world_size: int) -> list[dict[str, Any]]:
        if world_size not in self._results:
            try:
                self._results[world_size] = self._run(world_size)
            except (AssertionError, subprocess.TimeoutExpired) as error:  # of every test, but they run once
                self._results[world_size] = error
        results = self._results[world_size]
        if isinstance(results, Exception):
            raise results
        return results

    def _run(self, world_size: int) -> list[dict[str, Any]]:
        jobs_file = self._root / f"jobs{world_size}.pt"
        keys = [key for size, key in sorted(self._keys) if size == world_size]
        torch.save({"-".join(k): (str(self._cases[k].path), self._cases[k].sequences) for k in keys}, jobs_file)
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
        try:
            outputs = [process.communicate(timeout=280)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output
        return [torch.load(jobs_file.with_name(f"rank{r}of{world_size}.pt")) for r in range(world_size)]


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest, cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """The jobs are those of the tests that were chosen, and what the tests of single facts ask for."""
    chosen = {
        (item.callspec.params["world_size"], item.callspec.params["key"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_ranks_equal_transformers"
    }
    facts = {(size, ("llama", variant)) for size in (2, 4) for variant in ("mha", "plain", "mqa")}
    return Worlds(cases, chosen | facts, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(
    ("world_size", "key"),
    [
        pytest.param(size, key, id=f"{size}-{'-'.join(key)}", marks=() if size == 2 and key in REPRESENTATIVE else LONG)
        for size, key in WORLDS
    ],
)
def test_ranks_equal_transformers(worlds: Worlds, cases: Cases, world_size: int, key: Key) -> None:
    results = worlds[world_size]
    first = results[0]["jobs"]["-".join(key)]["logits"]
    assert_equal_logits(first, cases[key].logits)
    for other in results[1:]:
        for a, b in zip(first, other["jobs"]["-".join(key)]["logits"], strict=True):
            assert torch.equal(a, b), "ranks must make the same choices"


@pytest.mark.parity
@pytest.mark.parametrize("key", [key for key in SHARDED if key not in UNSTAGED], ids="-".join)
def test_each_stage_of_two_ranks_reads_what_is_its_own(cases: Cases, key: Key) -> None:
    """A tensor that nothing reads ends a start; one of another stage or of another rank's share does not."""
    path = cases[key].path
    for stage in range(2):

        def of_rank(group: ProcessGroup, stage: int = stage) -> Runner:
            layout = Layout.of(2 * stage + group.rank, 4, num_stages=2)
            return load(path, ranks=Ranks(layout, group, group))

        assert len(on_ranks(2, of_rank)) == 2


@pytest.mark.parametrize("world_size", SIZES)
def test_kv_heads_are_divided_or_replicated(worlds: Worlds, world_size: int) -> None:
    jobs = worlds[world_size][0]["jobs"]
    assert jobs["llama-mha"]["kv_heads"] == 4 // world_size
    assert jobs["llama-plain"]["kv_heads"] == max(2 // world_size, 1)
    assert jobs["llama-mqa"]["kv_heads"] == 1


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", FLOAT8_JOBS)
def test_a_cache_in_float8_is_that_of_one_rank(worlds: Worlds, cases: Cases, world_size: int, name: str) -> None:
    """Sums over ranks differ in the last bit, and so may what is nearest in float8: a number here and there."""
    model_type, _, variant = name.partition("-")
    case = cases[model_type, variant]
    alone = run_protocol(load(case.path, cache_dtype=E4M3), case.sequences, 4, E4M3)
    assert_equal_logits(worlds[world_size][0]["jobs"][name]["float8"], alone, 2e-2)


@pytest.mark.parametrize("world_size", SIZES)
def test_collectives(worlds: Worlds, world_size: int) -> None:
    for result in worlds[world_size]:
        assert result["smallest"] == 10 - (world_size - 1)
        assert result["half sum"] == [sum(1.5 + r for r in range(world_size))] * 3
        assert result["gathered"] == [[float(r) for r in range(world_size)]] * 2


@pytest.mark.parametrize("world_size", SIZES)
def test_a_lost_rank_is_fatal(worlds: Worlds, world_size: int) -> None:
    """Rank 0 goes on alone after the others have ended: an error at once, not a wait."""
    lost = worlds[world_size][0]["lost"]
    assert lost.startswith("rank 0 lost rank ")
    assert "\n" not in lost
