"""Sizes and limits that a warm-up settles."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.drafts import use_drafts
from support.fake_model import FakeRunner, FakeStateRunner
from support.graph_doubles import CapturableRunner, PlainGraphCapture
from support.tiny_models import write_tokenizer

from model_server.adapters.slot_table import SlotTable
from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.engine import warm_up as memory_module
from model_server.engine.calls import Session
from model_server.engine.engine import Engine, EngineOptions
from model_server.engine.memory_plan import MemoryPlan
from model_server.engine.warm_up import Capacity, WarmupRequest, warm_up
from model_server.errors import RequestError, StartupError, WarmUpMemoryError
from model_server.features.adapters.feature import Adapters
from model_server.features.drafts.device.speculator import DeviceSpeculator
from model_server.features.drafts.drafters.drafter import DraftedRunner
from model_server.features.drafts.drafters.heads import Heads
from model_server.features.images.encoder import ImageEncoder, SampleImages
from model_server.features.images.families import FAMILIES
from model_server.features.images.feature import Images
from model_server.features.images.image import Encoded, Image
from model_server.memory.budget import CACHE_SHARE, DeviceMemory, Measured, cache_blocks
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import ModelInputs, RunnerTraits
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer
from wire.host import kv_memory

BLOCK = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


def _engine(
    tokenizer: Tokenizer, runner: FakeRunner | FakeStateRunner | GraphedRunner, *, chunking: bool = False
) -> Engine:
    options = EngineOptions(
        device=torch.device("cpu"), block_size=BLOCK, prompt_logprobs_allowed=True,
        chunking=chunking,
    )  # fmt: skip
    return Engine(runner, tokenizer, Sampler(runner.vocab_size, options.device), options)


def _warm_up(
    tokenizer: Tokenizer,
    runner: FakeRunner | FakeStateRunner | GraphedRunner | None = None,
    *,
    max_batch_total_tokens: int | None = None,
    cache_bytes: int | None = None,
    default_cache_bytes: int | None = None,
    model_max_length: int | None = None,
    group: ProcessGroup | None = None,
    engine: Engine | None = None,
    memory: DeviceMemory | None = None,
    cache_dtype: torch.dtype = torch.float32,
    **limits: int,
) -> tuple[Engine, Capacity]:
    engine = engine or _engine(tokenizer, runner or FakeRunner(vocab_size=tokenizer.vocab_size))
    request = NewRequest(
        id=0, input_ids=(0,) * 400,
        sampling=SamplingParameters(temperature=0.9, top_k=10, top_p=0.9, typical_p=0.9, watermark=True),
        stopping=StoppingParameters(max_new_tokens=20, ignore_eos_token=True),
        prefill_logprobs=True, top_n_tokens=20,
        blocks=np.array([], np.int32), cache_len=0, chunk_len=None,
    )  # fmt: skip
    asked = WarmupRequest(
        session=Session(max_prefill_tokens=limits.get("max_prefill_tokens", 4096)),
        requests=[request],
        max_input_tokens=limits.get("max_input_tokens"),
        max_total_tokens=limits.get("max_total_tokens"),
    )
    plan = MemoryPlan(
        dtype=cache_dtype, max_batch_total_tokens=max_batch_total_tokens, cuda_memory_fraction=1.0,
        model_max_length=model_max_length, memory=memory, weight_bytes=12 << 20,
        cache_bytes=cache_bytes, default_cache_bytes=default_cache_bytes,
    )  # fmt: skip
    with torch.inference_mode():
        return engine, warm_up(engine, group or ProcessGroup(), plan, asked)


def test_defaults_on_a_cpu(tokenizer: Tokenizer) -> None:
    engine, capacity = _warm_up(tokenizer)
    assert capacity == Capacity(total_tokens=16_000, max_input_tokens=4095, max_total_tokens=4096)
    assert engine.cache.num_blocks == 1000


TOKEN_BYTES = 8
"""Of the fake runner's cache in float32."""


@pytest.mark.parametrize(
    ("default", "tokens"),
    [
        (100 * TOKEN_BYTES, 16_000),
        (20_000 * TOKEN_BYTES, 19_968),
        (50_000 * TOKEN_BYTES, 49_920),
        ((2**20 + 5000) * TOKEN_BYTES, 2**20),
    ],
)
def test_memory_of_a_cpu_is_a_number_of_tokens_between_two_bounds(
    tokenizer: Tokenizer, default: int, tokens: int
) -> None:
    engine, capacity = _warm_up(tokenizer, default_cache_bytes=default)
    assert capacity.total_tokens == engine.cache.num_blocks * BLOCK == tokens
    assert engine.cache.rows[0].nbytes == tokens * TOKEN_BYTES


@pytest.mark.parametrize(
    ("asked", "bound", "tokens"), [(1000, None, 768), (50_000, None, 49_920), (50_000, 600, 592), (1000, 60_000, 768)]
)
def test_memory_that_was_asked_for_is_taken(tokenizer: Tokenizer, asked: int, bound: int | None, tokens: int) -> None:
    """Whatever the default would be, and no more tokens than the user allows."""
    _, capacity = _warm_up(
        tokenizer, cache_bytes=asked * TOKEN_BYTES, default_cache_bytes=99, max_batch_total_tokens=bound
    )
    assert capacity.total_tokens == tokens


def test_memory_that_holds_no_request_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(StartupError, match=r"--kv-cache-memory of 100 bytes .* leaves no KV cache.* takes 8"):
        _warm_up(tokenizer, cache_bytes=100)


def test_more_memory_than_there_is_names_the_option(tokenizer: Tokenizer) -> None:
    with pytest.raises(StartupError, match=r"give a lower --kv-cache-memory or --max-batch-total-tokens \("):
        _warm_up(tokenizer, cache_bytes=1 << 60)


def test_memory_that_the_kernel_would_give_out_and_not_have_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_server.engine.warm_up.total_memory", lambda: 10_000 * TOKEN_BYTES)
    _warm_up(tokenizer, cache_bytes=9_000 * TOKEN_BYTES)
    with pytest.raises(StartupError, match="give a lower --kv-cache-memory"):
        _warm_up(tokenizer, cache_bytes=20_000 * TOKEN_BYTES)


def test_memory_that_was_asked_for_bounds_the_cache_of_a_gpu(tokenizer: Tokenizer) -> None:
    _, free = _warm_up(tokenizer, memory=FakeMemory())
    _, bounded = _warm_up(tokenizer, memory=FakeMemory(), cache_bytes=1000 * TOKEN_BYTES)
    assert bounded.total_tokens == 992 < free.total_tokens


@pytest.mark.parametrize(("positions", "expected"), [(100_000, 16_000), (8192, 8192)])
def test_with_chunks_a_prompt_may_be_longer_than_one_prefill(
    tokenizer: Tokenizer, positions: int, expected: int
) -> None:
    engine = _engine(tokenizer, FakeRunner(vocab_size=tokenizer.vocab_size, max_positions=positions), chunking=True)
    _, capacity = _warm_up(tokenizer, engine=engine, max_prefill_tokens=1024)
    assert capacity.max_total_tokens == expected and capacity.max_input_tokens == expected - 1
    assert engine.session.max_prefill_tokens == 1024


def test_the_longest_request_always_fits_beside_the_reserved_block(tokenizer: Tokenizer) -> None:
    engine, capacity = _warm_up(tokenizer, max_total_tokens=20_000)
    assert (engine.cache.num_blocks - 1) * BLOCK >= 20_000
    assert capacity.max_total_tokens == 20_000
    assert cast(FakeRunner, engine.runner).longest == 20_000


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        ({"max_prefill_tokens": 32, "max_total_tokens": 2000}, 4000),
        ({"max_prefill_tokens": 32, "max_input_tokens": 900, "max_total_tokens": 2000}, 1800),
        ({"max_prefill_tokens": 1500, "max_input_tokens": 900}, 3000),
    ],
)
def test_two_prompts_of_images_are_kept(tokenizer: Tokenizer, limits: dict[str, int], rows: int) -> None:
    """However little a step may compute."""
    engine = _with_tower(tokenizer, SampledTower([]), chunking=True)
    _warm_up(tokenizer, engine=engine, **limits)
    assert _encoder(engine).capacity == rows


def test_what_the_user_sets_is_echoed(tokenizer: Tokenizer) -> None:
    _, capacity = _warm_up(tokenizer, max_input_tokens=100, max_total_tokens=300)
    assert (capacity.max_input_tokens, capacity.max_total_tokens) == (100, 300)


def test_no_request_may_be_longer_than_a_table_of_positions(tokenizer: Tokenizer) -> None:
    runner = FakeRunner(tokenizer.vocab_size, traits=RunnerTraits(position_rows=300))
    engine = _engine(tokenizer, runner)
    with pytest.raises(StartupError, match="--max-total-tokens 301: this model has learned 300 positions"):
        _warm_up(tokenizer, engine=engine, max_total_tokens=301)
    _, capacity = _warm_up(tokenizer, engine=engine, max_total_tokens=300)
    assert capacity.max_total_tokens == 300


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
    class FullPeer(ProcessGroup):
        def all_reduce_min(self, value: int) -> int:
            return min(value, 1)

    with pytest.raises(StartupError, match="--max-batch-prefill-tokens"):
        _warm_up(tokenizer, group=FullPeer(), memory=FakeMemory())


def test_a_bound_below_two_blocks_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(StartupError, match=f"-tokens {BLOCK} leaves no KV cache.*at least {2 * BLOCK}"):
        _warm_up(tokenizer, max_batch_total_tokens=BLOCK)


def test_a_prefill_that_does_not_fit_names_the_flag(tokenizer: Tokenizer) -> None:
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, fail_on={1: torch.OutOfMemoryError("no memory")})
    with pytest.raises(StartupError, match="--max-batch-prefill-tokens"):
        _warm_up(tokenizer, runner)


def test_long_sequences_that_do_not_fit_name_their_flag(tokenizer: Tokenizer) -> None:
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, fail_on={1: torch.OutOfMemoryError("no memory")})
    with pytest.raises(StartupError, match=r"or `--max-total-tokens` \(5000\)"):
        _warm_up(tokenizer, runner, max_total_tokens=5000)


SHORT = [
    torch.OutOfMemoryError("no memory"),
    MemoryError("no memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: tried 1 bytes"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", SHORT, ids=["device", "python", "torch-on-a-cpu", "driver"])
def test_after_a_warm_up_that_did_not_fit_a_smaller_one_may_be_asked_for(
    tokenizer: Tokenizer, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, fail_on={1: error, 3: error, 4: error})
    engine = _engine(tokenizer, runner)
    with pytest.raises(
        WarmUpMemoryError, match=r"^Not enough memory to handle 4096 prefill tokens\. .*--max-batch-pre"
    ):
        _warm_up(tokenizer, engine=engine)
    # The prefill succeeds now, and the decode step after it does not.
    with pytest.raises(WarmUpMemoryError, match="2048"):
        _warm_up(tokenizer, engine=engine, max_prefill_tokens=2048)
    assert "Memory in MiB" in caplog.text
    with pytest.raises(WarmUpMemoryError, match=r"\(MiB: weights 12\.0, free 100\.0 of 200\.0\)$"):
        _warm_up(tokenizer, engine=engine, memory=FakeMemory(free=100 << 20, total=200 << 20), max_prefill_tokens=2048)
    engine.steps.features = (Adapters((), SlotTable(3, lambda slot, number: False)),)
    runner.fail_on = {runner.num_forwards + 1: error}
    with pytest.raises(WarmUpMemoryError, match=r"-tokens`, or `--lora-slots` \(there are 3\) or `--lora-max-rank` "):
        _warm_up(tokenizer, engine=engine, max_prefill_tokens=2048)
    engine.steps.features = ()
    _, capacity = _warm_up(tokenizer, engine=engine, max_prefill_tokens=1024)
    assert (capacity.max_total_tokens, engine.session.max_prefill_tokens) == (1024, 1024)


def test_other_errors_of_the_warm_up_are_not_about_memory(tokenizer: Tokenizer) -> None:
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, fail_on={1: RuntimeError("CUDA error: device-side assert")})
    with pytest.raises(RuntimeError, match="device-side assert"):
        _warm_up(tokenizer, runner)


def test_memory_that_is_short_on_another_rank(tokenizer: Tokenizer) -> None:
    class ShortPeer(ProcessGroup):
        def any_of(self, yes: bool, limit_s: float | None = None) -> bool:
            assert not yes and limit_s is None
            return True

    with pytest.raises(WarmUpMemoryError, match="Not enough memory to handle 4096 prefill tokens"):
        _warm_up(tokenizer, group=ShortPeer())


def test_the_table_says_where_the_memory_goes(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine, _ = _warm_up(tokenizer, memory=FakeMemory(free=600 << 20, peak=50 << 20, total=1000 << 20))
    [table] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Memory in MiB")]
    rows = {line.split("  ")[0]: line for line in table.splitlines()[1:]}
    assert list(rows) == ["weights", "activations", "KV cache", "CUDA graphs", "free"]
    cache = engine.cache.num_blocks * BLOCK * 2 * 4 / 2**20
    sizes = [float(rows[name][12:22]) for name in rows]
    assert sizes == [12.0, 50.0, round(cache, 1), 0.0, round(550 - cache, 1)]
    assert f"{engine.cache.num_blocks} blocks of 16 tokens" in rows["KV cache"] and "of 1000.0" in rows["free"]


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
    engine, capacity = _warm_up(
        tokenizer, FakeStateRunner(tokenizer.vocab_size, traits=RunnerTraits(state_bytes=12_345))
    )
    assert engine.keeps_state
    assert engine.cache.rows == []
    assert capacity.total_tokens == engine.cache.num_blocks * BLOCK == 16_000
    assert capacity.max_total_tokens == 4096
    _, bounded = _warm_up(tokenizer, FakeStateRunner(vocab_size=tokenizer.vocab_size), max_batch_total_tokens=640)
    assert bounded.total_tokens == 640


def test_without_layers_of_keys_and_a_known_length_a_request_is_bounded(tokenizer: Tokenizer) -> None:
    """Tables of a graph have a column for each block of the longest request."""

    class UncachedRunner(FakeRunner):
        def forward(self, inputs: ModelInputs, cache: KvCache) -> torch.Tensor:
            rows = inputs.input_ids if inputs.logit_rows is None else inputs.logit_rows
            return torch.zeros(len(rows), self.vocab_size)

    runner = UncachedRunner(vocab_size=tokenizer.vocab_size, max_positions=None, kv_shapes=())
    engine = _engine(tokenizer, runner, chunking=True)
    _, capacity = _warm_up(tokenizer, engine=engine, cache_bytes=1 << 20)
    assert capacity.total_tokens == kv_memory.UNCACHED_TOKENS
    assert capacity.max_total_tokens == kv_memory.MOST_TOKENS


GIB = 2**30


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.95, 1.0])
def test_almost_all_of_the_budget_becomes_cache(fraction: float) -> None:
    measured = Measured(total=140 * GIB, free=120 * GIB, peak=2 * GIB, graphs=GIB)
    block = 16 * 131_072
    blocks = cache_blocks(measured, fraction, block)
    budget = 120 * GIB - (1 - fraction) * 140 * GIB - 3 * GIB
    assert 0.92 * budget <= blocks * block <= budget
    assert blocks == int(measured.budget(fraction) * CACHE_SHARE) // block


def test_what_others_use_is_not_ours() -> None:
    alone = Measured(total=80 * GIB, free=60 * GIB, peak=GIB, graphs=0)
    beside = Measured(total=80 * GIB, free=40 * GIB, peak=GIB, graphs=0)
    assert alone.budget(0.9) - beside.budget(0.9) == 20 * GIB


@pytest.mark.parametrize("free", [0, 3, 8])
def test_no_budget_is_no_blocks(free: int) -> None:
    assert cache_blocks(Measured(total=80 * GIB, free=free * GIB, peak=GIB, graphs=GIB), 0.9, 1 << 21) == 0


class FakeMemory:
    """A device of 1 MB that notes what it is asked."""

    def __init__(self, free: int = 600_000, peak: int = 50_000, total: int = 1_000_000) -> None:
        self.free = free
        self.total = total
        self.largest = peak
        self.asked: list[str] = []

    def start(self) -> None:
        self.asked.append("begin")

    def peak(self) -> int:
        self.asked.append("peak")
        return self.largest

    def rest(self) -> tuple[int, int]:
        self.asked.append("rest")
        return self.free, self.total


class _Follows(Heads):
    """A drafter with a layer, which keeps its part of the cache."""

    def __init__(self) -> None:
        self.kv_shapes = (KvShape(1, 4, 4),)
        self.weight_bytes = 0
        self.cache: KvCache | None = None

    def use(self, cache: KvCache | None) -> None:
        self.cache = cache


class _Forgets(PlainGraphCapture):
    """As a device: released graphs hold nothing."""

    def release(self) -> None:
        super().release()
        self.graphs.clear()


@pytest.mark.parametrize("graphed", [False, True])
def test_with_a_drafter_no_memory_of_an_earlier_cache_is_kept(tokenizer: Tokenizer, graphed: bool) -> None:
    """Neither while free memory is measured, nor when a warm-up begins again."""
    made: list[weakref.ref[torch.Tensor]] = []

    class Memory(FakeMemory):
        def rest(self) -> tuple[int, int]:
            assert not any(rows() is not None for rows in made)
            return super().rest()

    class Base(CapturableRunner):
        def forward(self, inputs: ModelInputs, cache: KvCache) -> torch.Tensor:
            made.append(weakref.ref(cache.rows[0]))
            return super().forward(inputs, cache)

    drafter = _Follows()
    runner: Any = DraftedRunner(Base(vocab_size=tokenizer.vocab_size), drafter)
    if graphed:
        runner = GraphedRunner(runner, (4, 1), _Forgets(), keeps=lambda: None)
    memory = Memory()
    engine, _ = _warm_up(tokenizer, runner, memory=memory)
    assert made and memory.asked.count("rest") == 1
    _warm_up(tokenizer, engine=engine, memory=memory)
    assert memory.asked.count("rest") == 2


def test_a_measured_device_is_filled(tokenizer: Tokenizer) -> None:
    memory = FakeMemory()
    engine, capacity = _warm_up(tokenizer, memory=memory)
    block_bytes = BLOCK * 2 * 4
    assert engine.cache.num_blocks == int(550_000 * CACHE_SHARE) // block_bytes
    assert capacity.total_tokens == engine.cache.num_blocks * BLOCK
    assert memory.asked == ["begin", "peak", "rest"]
    bounded, _ = _warm_up(tokenizer, memory=FakeMemory(), max_batch_total_tokens=640)
    assert bounded.cache.num_blocks == 640 // BLOCK


def test_memory_of_drafts_beside_the_model_is_kept_free(tokenizer: Tokenizer) -> None:
    """Histories of the longest sequences, and what penalties make of them."""
    engine = _engine(tokenizer, FakeRunner(vocab_size=tokenizer.vocab_size))
    speculator = DeviceSpeculator(3, 8, torch.device("cpu"), BLOCK, alone=True)
    use_drafts(engine, speculator)
    _warm_up(tokenizer, engine=engine, memory=FakeMemory(), max_total_tokens=1000)
    beside = speculator.bytes_beside(1000)
    assert 8 * 1000 * 17 < beside < 8 * 1000 * 40
    assert engine.cache.num_blocks == int((550_000 - beside) * CACHE_SHARE) // (BLOCK * 2 * 4)


def test_a_cache_in_float8_holds_as_many_more_tokens_as_it_is_narrower(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sizes = {}
    for dtype in (torch.float32, torch.float8_e4m3fn):
        engine, capacity = _warm_up(tokenizer, memory=FakeMemory(), cache_dtype=dtype)
        assert engine.cache.rows[0].dtype is dtype
        sizes[dtype] = capacity.total_tokens
        assert f"KV cache in {str(dtype).removeprefix('torch.')}: {engine.cache.num_blocks} blocks" in caplog.text
    assert sizes[torch.float8_e4m3fn] >= 3.9 * sizes[torch.float32]


def test_a_measured_device_without_room(tokenizer: Tokenizer) -> None:
    with pytest.raises(StartupError, match="--cuda-memory-fraction"):
        _warm_up(tokenizer, memory=FakeMemory(peak=700_000))


def _graphed(tokenizer: Tokenizer, **changes: object) -> tuple[GraphedRunner, PlainGraphCapture]:
    capture = PlainGraphCapture(**changes)  # type: ignore[arg-type]
    return GraphedRunner(CapturableRunner(vocab_size=tokenizer.vocab_size), (8, 4, 2, 1), capture), capture


def test_graphs_are_measured_first_and_captured_last(tokenizer: Tokenizer) -> None:
    runner, capture = _graphed(tokenizer, cost=10_000)
    engine, _ = _warm_up(tokenizer, runner, memory=FakeMemory())
    block_bytes = BLOCK * 2 * 4
    assert engine.cache.num_blocks == int(510_000 * CACHE_SHARE) // block_bytes, "room for four of them is kept"
    assert runner.captured_sizes == (1, 2, 4, 8)
    assert [r.released for r in capture.graphs] == [True, True, False, False, False, False]


def test_a_second_warm_up_releases_the_graphs_of_the_first(tokenizer: Tokenizer) -> None:
    runner, capture = _graphed(tokenizer, cost=10_000)
    engine, first = _warm_up(tokenizer, runner, memory=FakeMemory())
    old = engine.cache
    _, second = _warm_up(tokenizer, engine=engine, memory=FakeMemory())
    assert first == second and engine.cache is not old
    assert [r.released for r in capture.graphs] == [True] * 8 + [False] * 4


def test_graphs_reach_as_far_as_a_request_may(tokenizer: Tokenizer) -> None:
    runner, _ = _graphed(tokenizer)
    _, capacity = _warm_up(tokenizer, runner, memory=FakeMemory())
    assert runner._buffers is not None and runner._buffers.max_length == capacity.max_total_tokens


def test_memory_that_is_gone_when_it_is_wanted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = memory_module.KvCache, []

    def cache(shapes: object, num_blocks: int, *rest: object) -> object:
        tried.append(num_blocks)
        if num_blocks > 4000:
            raise torch.OutOfMemoryError("another process was quicker")
        return real(shapes, num_blocks, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_module, "KvCache", cache)
    engine, capacity = _warm_up(tokenizer, memory=FakeMemory())
    assert engine.cache.num_blocks == tried[-1] == int(tried[-2] * 0.95) <= 4000
    assert capacity.total_tokens == engine.cache.num_blocks * BLOCK


class SampledTower:
    """Tower and samples in one, which notes what it is asked."""

    family = FAMILIES["llava"]
    image_token = 9
    row_bytes = 1000

    def __init__(self, notes: list[str], error: Exception | None = None) -> None:
        self.notes = notes
        self.error = error

    def small(self) -> Image:
        self.notes.append("small")
        return Image(bytes(32), {}, 5)

    def largest(self, most_tokens: int) -> Image:
        self.notes.append(f"largest of {most_tokens}")
        return Image(bytes(32), {}, 5)

    def encode(self, image: Image) -> Encoded:
        self.notes.append("encode")
        if self.error is not None:
            raise self.error
        return Encoded(torch.zeros(5, 1))


def _with_tower(tokenizer: Tokenizer, tower: SampledTower, **options: Any) -> Engine:
    engine = _engine(tokenizer, FakeRunner(vocab_size=tokenizer.vocab_size), **options)
    encoder = ImageEncoder(tower, samples=cast(SampleImages, tower))
    engine.steps.features = (Images(encoder, engine.runner.vocab_size),)
    return engine


def _encoder(engine: Engine) -> ImageEncoder:
    (images,) = engine.steps.features
    assert isinstance(images, Images)
    return images.encoder


def test_an_image_is_encoded_while_memory_is_measured(tokenizer: Tokenizer) -> None:
    """The largest that a prompt can have; then room for those that are kept is left beside the blocks."""
    memory = FakeMemory()
    engine = _with_tower(tokenizer, SampledTower(memory.asked))
    _warm_up(tokenizer, engine=engine, memory=memory, max_prefill_tokens=32, max_input_tokens=100)
    assert memory.asked[:4] == ["begin", "largest of 100", "encode", "peak"]
    block_bytes = BLOCK * 2 * 4
    assert engine.cache.num_blocks == int((550_000 - 200 * 1000) * CACHE_SHARE) // block_bytes
    assert _encoder(engine).num_rows == 0


def test_on_a_cpu_a_small_image_is_encoded(tokenizer: Tokenizer) -> None:
    notes: list[str] = []
    _warm_up(tokenizer, engine=_with_tower(tokenizer, SampledTower(notes)))
    assert notes == ["small", "encode"]


@pytest.mark.parametrize("error", [RequestError("an image has 4 tokens, but its tower makes 5"), ValueError("a shape")])
def test_a_tower_that_does_not_fit_its_processor_fails_the_start(tokenizer: Tokenizer, error: Exception) -> None:
    with pytest.raises(StartupError, match=f"image processor and vision tower .* do not fit: {error}"):
        _warm_up(tokenizer, engine=_with_tower(tokenizer, SampledTower([], error)))


def test_an_image_that_needs_too_much_memory_is_a_matter_of_memory(tokenizer: Tokenizer) -> None:
    engine = _with_tower(tokenizer, SampledTower([], torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(WarmUpMemoryError):
        _warm_up(tokenizer, engine=engine, memory=FakeMemory())
