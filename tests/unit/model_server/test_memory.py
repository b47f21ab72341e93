"""Sizes and limits that a warm-up settles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_model import FakeRunner, FakeStateRunner
from support.tiny_models import write_tokenizer

from model_server.batch.sequence import NewRequest
from model_server.distributed import ProcessGroup
from model_server.engine import Engine, EngineOptions
from model_server.errors import StartupError
from model_server.memory import Capacity, MemoryPlan, WarmupRequest, warm_up
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler
from model_server.tokenizer import Tokenizer

BLOCK = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


def _engine(tokenizer: Tokenizer, runner: FakeRunner | FakeStateRunner, *, chunking: bool = False) -> Engine:
    options = EngineOptions(
        device=torch.device("cpu"), rank=0, world_size=1, block_size=BLOCK, prompt_logprobs_allowed=True,
        chunking=chunking,
    )  # fmt: skip
    return Engine(runner, tokenizer, Sampler(runner.vocab_size, options.device), options)


def _warm_up(
    tokenizer: Tokenizer,
    runner: FakeRunner | FakeStateRunner | None = None,
    *,
    max_batch_total_tokens: int | None = None,
    model_max_length: int | None = None,
    group: ProcessGroup | None = None,
    engine: Engine | None = None,
    **limits: int,
) -> tuple[Engine, Capacity]:
    engine = engine or _engine(tokenizer, runner or FakeRunner(vocab_size=tokenizer.vocab_size))
    request = NewRequest(
        id=0, text="_test " * 500, truncate=400, add_special_tokens=True,
        sampling=SamplingParameters(temperature=0.9, top_k=10, top_p=0.9, typical_p=0.9, watermark=True),
        stopping=StoppingParameters(max_new_tokens=20, ignore_eos_token=True),
        prefill_logprobs=True, top_n_tokens=20,
        blocks=np.array([], np.int32), slots=np.array([], np.int64), cache_len=0, chunk_len=None,
    )  # fmt: skip
    asked = WarmupRequest(
        requests=[request],
        max_input_tokens=limits.get("max_input_tokens"),
        max_prefill_tokens=limits.get("max_prefill_tokens", 4096),
        max_total_tokens=limits.get("max_total_tokens"),
    )
    plan = MemoryPlan(
        dtype=torch.float32, max_batch_total_tokens=max_batch_total_tokens, cuda_memory_fraction=1.0,
        model_max_length=model_max_length,
    )  # fmt: skip
    with torch.inference_mode():
        return engine, warm_up(engine, group or ProcessGroup(), plan, asked)


def test_defaults_on_a_cpu(tokenizer: Tokenizer) -> None:
    engine, capacity = _warm_up(tokenizer)
    assert capacity == Capacity(total_tokens=16_000, max_input_tokens=4095, max_total_tokens=4096)
    assert engine.cache.num_blocks == 1000


@pytest.mark.parametrize(("positions", "expected"), [(100_000, 16_000), (8192, 8192)])
def test_with_chunks_a_prompt_may_be_longer_than_one_prefill(
    tokenizer: Tokenizer, positions: int, expected: int
) -> None:
    engine = _engine(tokenizer, FakeRunner(vocab_size=tokenizer.vocab_size, max_positions=positions), chunking=True)
    _, capacity = _warm_up(tokenizer, engine=engine, max_prefill_tokens=1024)
    assert capacity.max_total_tokens == expected and capacity.max_input_tokens == expected - 1
    assert engine.max_prefill_tokens == 1024


def test_the_longest_request_always_fits_beside_the_reserved_block(tokenizer: Tokenizer) -> None:
    engine, capacity = _warm_up(tokenizer, max_total_tokens=20_000)
    assert (engine.cache.num_blocks - 1) * BLOCK >= 20_000
    assert capacity.max_total_tokens == 20_000


def test_what_the_user_sets_is_echoed(tokenizer: Tokenizer) -> None:
    _, capacity = _warm_up(tokenizer, max_input_tokens=100, max_total_tokens=300)
    assert (capacity.max_input_tokens, capacity.max_total_tokens) == (100, 300)


def test_the_users_capacity_is_an_upper_bound(tokenizer: Tokenizer) -> None:
    engine, capacity = _warm_up(tokenizer, max_batch_total_tokens=1000)
    assert engine.cache.num_blocks == 62 and capacity.total_tokens == 992
    assert capacity.max_total_tokens == 992


@pytest.mark.parametrize(("positions", "model_max"), [(512, None), (4096, 512), (None, 512)])
def test_the_models_own_bounds_hold(tokenizer: Tokenizer, positions: int | None, model_max: int | None) -> None:
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, max_positions=positions)
    assert _warm_up(tokenizer, runner, model_max_length=model_max)[1].max_total_tokens == 512


def test_all_ranks_take_the_smallest_cache(tokenizer: Tokenizer) -> None:
    class SmallerPeer(ProcessGroup):
        def all_reduce_min(self, value: int) -> int:
            return min(value, 77)

    engine, capacity = _warm_up(tokenizer, group=SmallerPeer())
    assert engine.cache.num_blocks == 77 and capacity.total_tokens == 77 * BLOCK


def test_no_room_at_all_names_the_flags(tokenizer: Tokenizer) -> None:
    with pytest.raises(StartupError, match="--max-batch-prefill-tokens"):
        _warm_up(tokenizer, max_batch_total_tokens=BLOCK)


def test_a_prefill_that_does_not_fit_names_the_flag(tokenizer: Tokenizer) -> None:
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, fail_on={1: torch.OutOfMemoryError("no memory")})
    with pytest.raises(StartupError, match="--max-batch-prefill-tokens"):
        _warm_up(tokenizer, runner)


def test_a_second_router_can_warm_up_again(tokenizer: Tokenizer) -> None:
    engine, first = _warm_up(tokenizer)
    old = engine.cache
    _, second = _warm_up(tokenizer, engine=engine, max_total_tokens=20_000)
    assert second.total_tokens > first.total_tokens
    assert engine.cache is not old


def test_a_model_without_scores_does_not_start(tokenizer: Tokenizer) -> None:
    """With row errors nothing else would say so: every request would fail on a server that calls itself ready."""
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, poisoned=set(range(tokenizer.vocab_size)))
    engine = _engine(tokenizer, runner)
    engine.stock_router = False
    with pytest.raises(StartupError, match="not numbers"):
        _warm_up(tokenizer, engine=engine)


def test_a_rank_learns_that_another_could_not_run_the_warm_up(tokenizer: Tokenizer) -> None:
    class FailedPeer(ProcessGroup):
        def all_reduce_min(self, value: int) -> int:
            return 0

    with pytest.raises(StartupError, match="another rank"):
        _warm_up(tokenizer, group=FailedPeer())


def test_a_runner_that_keeps_states_gets_blocks_without_memory(tokenizer: Tokenizer) -> None:
    """The router's budgets go on in tokens; the cache that stands for them is empty."""
    engine, capacity = _warm_up(tokenizer, FakeStateRunner(vocab_size=tokenizer.vocab_size, state_bytes=12_345))
    assert engine.keeps_state
    assert engine.cache.rows == []
    assert capacity.total_tokens == engine.cache.num_blocks * BLOCK == 16_000
    assert capacity.max_total_tokens == 4096
    _, bounded = _warm_up(tokenizer, FakeStateRunner(vocab_size=tokenizer.vocab_size), max_batch_total_tokens=640)
    assert bounded.total_tokens == 640
