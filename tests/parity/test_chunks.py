"""A real model through the engine: chunks, growth, cached prefixes and resumption give the tokens of the plain run."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.engine_run import BLOCK, NEW_TOKENS, Router, make_engine, make_requests
from support.running_server import free_port
from support.tiny_models import tiny_checkpoint

from model_server.distributed.group import ProcessGroup
from model_server.models.model import describe
from model_server.weights.checkpoint import examine

# Layers keep states.
STATES = ("bamba", "qwen3_next", "kimi_linear", "minimax", "jamba")
Said = dict[int, dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "lfm2",
        "qwen3_next",
        "bamba",
        "deepseek_v32",
        pytest.param("kimi_linear", marks=pytest.mark.parity),
        pytest.param("minimax", marks=pytest.mark.parity),
        pytest.param("jamba", marks=pytest.mark.parity),
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Said:
    with torch.inference_mode():
        said = Router(make_engine(checkpoint, ProcessGroup(), 10_000)).whole(make_requests())
    assert all(len(s["ids"]) == NEW_TOKENS for s in said.values()) and len(said) == 5
    return said


def assert_same(actual: Said, expected: Said) -> None:
    assert sorted(actual) == sorted(expected)
    for request_id, said in actual.items():
        prompt, other = said["prompt"], expected[request_id]["prompt"]
        assert {**said, "prompt": None} == {**expected[request_id], "prompt": None}, request_id
        assert (prompt is None) == (other is None)
        if prompt is not None:
            assert math.isnan(prompt[0]) and np.allclose(prompt[1:], other[1:], atol=1e-4)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 11, 20, 100])
def test_chunks_give_the_same_tokens(checkpoint: Path, plain: Said, budget: int) -> None:
    with torch.inference_mode():
        assert_same(Router(make_engine(checkpoint, ProcessGroup(), budget)).chunked(make_requests()), plain)


@pytest.mark.parametrize("count", range(1, NEW_TOKENS))
def test_resumed_requests_give_the_same_tokens(checkpoint: Path, plain: Said, count: int) -> None:
    """All of them are preempted after `count` tokens, and computed again in chunks on a new cache."""
    resumed = []
    for request in make_requests():
        length = len(request.input_ids) + count
        blocks = np.array([*request.blocks, *range(40 + 4 * request.id, 44 + 4 * request.id)], np.int32)
        blocks = blocks[: -(-length // BLOCK)]
        ids = tuple(plain[request.id]["ids"][:count])
        resumed.append(dataclasses.replace(request, blocks=blocks, resume_ids=ids, prefill_logprobs=False))
    with torch.inference_mode():
        said = Router(make_engine(checkpoint, ProcessGroup(), 6)).chunked(resumed)
    for request_id, expected in plain.items():
        assert said[request_id]["ids"] == expected["ids"][count:]
        assert said[request_id]["texts"] == expected["texts"][count:]
        assert said[request_id]["end"] == expected["end"]


@pytest.mark.parametrize("chunk_len", [None, 1, 4])
def test_a_cached_prefix_gives_the_same_tokens(checkpoint: Path, plain: Said, chunk_len: int | None) -> None:
    """Each request's whole blocks are in the cache from a first life; the rest of its cache is not a number again."""
    if describe(examine(checkpoint)).config.model_type in STATES:
        pytest.skip("blocks alone are not enough to go on from")
    with torch.inference_mode():
        router = Router(make_engine(checkpoint, ProcessGroup(), 6))
        router.whole(make_requests())
        router.said.clear()
        again = []
        for request in make_requests():
            cached = (len(request.input_ids) - 1) // BLOCK * BLOCK
            again.append(dataclasses.replace(request, cache_len=cached, chunk_len=chunk_len, prefill_logprobs=False))
            for rows in router.engine.cache.rows:
                rows.view(128, -1, rows.shape[1])[torch.from_numpy(request.blocks[cached // BLOCK :])] = math.nan
        for request in again:
            if request.chunk_len is not None:
                rest = len(request.input_ids) - request.cache_len
                again[request.id] = dataclasses.replace(request, chunk_len=min(chunk_len or rest, rest))
        said = router.whole(again)
    for request_id, expected in plain.items():
        assert said[request_id]["ids"] == expected["ids"]


@pytest.mark.parametrize(
    ("world_size", "num_stages"),
    [
        pytest.param(2, 1, marks=pytest.mark.parity, id="two shards"),
        pytest.param(2, 2, id="two stages"),
        pytest.param(4, 2, marks=pytest.mark.weekly, id="two stages of two shards"),
    ],
)
def test_ranks_give_the_tokens_of_one(checkpoint: Path, plain: Said, world_size: int, num_stages: int) -> None:
    """The ranks of the last stage answer, each for its own requests."""
    if world_size == 2 and describe(examine(checkpoint)).config.model_type in STATES:
        pytest.skip("tried with the rest of the parity tests")
    arguments = [str(world_size), str(free_port()), str(checkpoint), "3", str(num_stages)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "parity.engine_run", str(rank), *arguments],
            cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    said = [torch.load(checkpoint / f"said{rank}of{world_size}in{num_stages}.pt") for rank in range(world_size)]
    silent, answering = said[: -(world_size // num_stages)], said[-(world_size // num_stages) :]
    assert num_stages == 1 or (silent and not any(silent))
    assert all(request_id % len(answering) == rank for rank, own in enumerate(answering) for request_id in own)
    assert_same({request_id: one for own in answering for request_id, one in own.items()}, plain)
