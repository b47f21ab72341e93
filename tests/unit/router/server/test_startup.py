"""From the socket to the limits: what is served, and what is refused with which flag's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.factories import RecordingMetrics, make_info
from support.fake_shard import FakeShard, ShardFailure
from support.fake_shard_server import serve

from router.config import RouterConfig
from router.errors import BackendError, StartupError
from router.limits import ServingLimits
from router.metrics import Metrics
from router.scheduling.queue.fair import KeyWork
from router.server import startup
from router.server.startup import connect_and_warm_up, connect_replicas, resolve_limits
from router.shards.warm_up import Capacity
from wire.v3 import generate_pb2 as pb
from wire.warm_up import NOT_ENOUGH_MEMORY


def limits(options: RouterConfig, capacity: int, *, answered_total: int = 4096, positions=None, tokenizer=None, **info):
    total = options.max_total_tokens or answered_total
    answer = Capacity(
        total_tokens=capacity, max_input_tokens=options.max_input_tokens or total - 1, max_total_tokens=total
    )
    return resolve_limits(options, make_info(**info), answer, max_positions=positions, tokenizer_max_length=tokenizer)


def test_unset_limits_are_what_one_prefill_holds():
    found = limits(RouterConfig(), 50_000, answered_total=40_000)
    assert (found.max_total_tokens, found.max_input_tokens) == (4096, 4095)
    assert found.max_batch_total_tokens == 50_000


def test_unset_limits_are_what_the_cache_holds_where_prompts_are_chunked():
    found = limits(RouterConfig(), 50_000, answered_total=40_000, chunks=True)
    assert (found.max_total_tokens, found.max_input_tokens) == (40_000, 39_999)


@pytest.mark.parametrize(
    ("device_type", "chunking", "budget", "asked", "tokens", "default"),
    [
        ("cpu", True, 4096, None, 1024, 256),
        ("cpu", True, 600, None, 600, 256),
        ("cpu", True, 100, None, 100, 100),
        ("cpu", True, 4096, 2000, 2000, 2000),
        ("cpu", False, 4096, None, 4096, 4096),
        ("cuda", True, 59_870, None, 4096, 2048),
        ("cuda", True, 3000, None, 3000, 2048),
        ("cuda", True, 59_870, 8192, 8192, 8192),
        ("cuda", True, 4096, 8192, 4096, 4096),
        ("cuda", False, 59_870, None, 59_870, 59_870),
    ],
)
def test_a_step_is_kept_short_where_prompts_can_be_cut(
    device_type: str, chunking: bool, budget: int, asked: int | None, tokens: int, default: int
) -> None:
    options = RouterConfig(
        max_batch_prefill_tokens=budget,
        max_step_prefill_tokens=asked,
        max_total_tokens=2000 if chunking else None,
        max_batch_total_tokens=100_000,
    )
    found = limits(options, 100_000, device_type=device_type, chunks=chunking)
    assert (found.max_batch_prefill_tokens, found.default_prefill_tokens) == (tokens, default)


def test_a_bound_of_a_step_is_refused_where_prompts_are_computed_whole() -> None:
    with pytest.raises(StartupError, match="`--max-step-prefill-tokens`: this model computes each prompt in one step"):
        limits(RouterConfig(max_step_prefill_tokens=512), 50_000)


def test_unset_limits_respect_model_and_tokenizer():
    assert limits(RouterConfig(), 50_000, positions=2048, tokenizer=3000).max_total_tokens == 2048
    assert limits(RouterConfig(), 50_000, positions=2048, tokenizer=1000).max_total_tokens == 1000


def test_given_limits_hold():
    options = RouterConfig(max_input_tokens=1000, max_total_tokens=6000)
    found = limits(options, 50_000, positions=2048)
    assert (found.max_input_tokens, found.max_total_tokens) == (1000, 6000)


def test_a_total_alone_leaves_prompts_within_one_prefill():
    found = limits(RouterConfig(max_total_tokens=8192), 50_000)
    assert (found.max_input_tokens, found.max_total_tokens) == (4096, 8192)


def test_k19_the_users_capacity_is_an_upper_bound():
    assert limits(RouterConfig(max_batch_total_tokens=20_000), 50_000).max_batch_total_tokens == 20_000
    assert limits(RouterConfig(max_batch_total_tokens=80_000), 50_000).max_batch_total_tokens == 50_000


def test_k21_prompts_larger_than_a_prefill_are_refused_unless_they_are_chunked():
    options = RouterConfig(max_input_tokens=5000, max_total_tokens=6000)
    with pytest.raises(StartupError, match="--max-batch-prefill-tokens"):
        limits(options, 50_000)
    assert limits(options, 50_000, chunks=True).max_input_tokens == 5000


def test_k22_a_prefill_larger_than_the_capacity_is_refused():
    with pytest.raises(StartupError, match="--max-batch-prefill-tokens"):
        limits(RouterConfig(), 3000)


def test_a_total_larger_than_the_capacity_is_refused():
    with pytest.raises(StartupError, match="Not enough memory to handle `max_total_tokens=60000`"):
        limits(RouterConfig(max_total_tokens=60_000), 50_000)


def test_input_must_be_below_total():
    with pytest.raises(StartupError, match="--max-input-tokens must be below --max-total-tokens"):
        limits(RouterConfig(max_input_tokens=2048, max_total_tokens=2048), 50_000)


def test_the_total_always_fits_beside_the_reserved_block():
    options = RouterConfig(max_total_tokens=1600, max_batch_prefill_tokens=1600)
    assert limits(options, 1600, block_size=16).max_total_tokens == 99 * 16 + 1
    assert limits(replace(options, max_total_tokens=1000), 1000 + 600).max_total_tokens == 1000


def test_limits_that_the_shards_did_not_take_are_refused():
    answer = Capacity(total_tokens=50_000, max_input_tokens=99, max_total_tokens=2048)
    with pytest.raises(StartupError, match="--max-input-tokens"):
        resolve_limits(
            RouterConfig(max_input_tokens=100), make_info(), answer, max_positions=None, tokenizer_max_length=None
        )


async def test_a_server_starts(tmp_path: Path):
    shards = [FakeShard(rank=r, world_size=2, block_size=16) for r in range(2)]
    async with serve(*shards, prefix=str(tmp_path / "s")) as path:
        metrics = RecordingMetrics()
        started = await connect_and_warm_up(
            RouterConfig(master_shard_uds_path=path, max_batch_total_tokens=8000),
            metrics,
            max_positions=2048,
            tokenizer_max_length=None,
        )
        assert started.limits.max_total_tokens == 2048
        assert started.limits.max_batch_total_tokens == 8000
        assert metrics.gauges["tgi_batch_max_total_tokens"] == 8000
        assert started.scheduler.can_ever_fit(1000, 1048)
        await started.shards.close()


@pytest.mark.parametrize(
    ("rpc", "message"),
    [
        ("ServiceDiscovery", "Unable to connect to the Python model shards: Server error: no"),
        ("ClearCache", "Unable to clear the Python model shards cache: Server error: no"),
        ("Info", "Unable to get the Python model shards info: Server error: no"),
        ("Warmup", "Unable to warmup the Python model shards: Server error: no"),
    ],
)
async def test_a_refusal_names_the_step(tmp_path: Path, rpc: str, message: str):
    shard = FakeShard()
    shard.failure = lambda called, request: ShardFailure("no") if called == rpc else None
    async with serve(shard, prefix=str(tmp_path / "s")) as path:
        with pytest.raises(StartupError) as caught:
            await connect_and_warm_up(
                RouterConfig(master_shard_uds_path=path),
                RecordingMetrics(),
                max_positions=None,
                tokenizer_max_length=None,
            )
        assert str(caught.value) == message


async def test_nobody_listens(tmp_path: Path):
    with pytest.raises(StartupError, match="Could not connect to Text Generation server"):
        await connect_and_warm_up(
            RouterConfig(master_shard_uds_path=str(tmp_path / "none")),
            RecordingMetrics(),
            max_positions=None,
            tokenizer_max_length=None,
        )


class ShortShard(FakeShard):
    """Has memory for warm-ups of up to `room` prefill tokens, and a cache that holds `holds`."""

    def __init__(self, room: int, *, holds: int = 16_000) -> None:
        super().__init__(block_size=16, capacity=holds)
        self.warmed: list[int] = []
        self.failure = lambda rpc, request: self._short(request, room) if rpc == "Warmup" else None

    def _short(self, request: pb.WarmupRequest, room: int) -> ShardFailure | None:
        self.warmed.append(request.max_prefill_tokens)
        said = f"{NOT_ENOUGH_MEMORY} {request.max_prefill_tokens} prefill tokens. You need to decrease the budget"
        return ShardFailure(said) if request.max_prefill_tokens > room else None


async def start(shard: FakeShard, folder: Path, **options: int | None) -> ServingLimits:
    async with serve(shard, prefix=str(folder / "s")) as path:
        started = await connect_and_warm_up(
            RouterConfig(master_shard_uds_path=path, **options),
            RecordingMetrics(),
            max_positions=None,
            tokenizer_max_length=None,
        )
        await started.shards.close()
        return started.limits


@pytest.mark.parametrize(
    ("room", "least", "tried"), [(1200, 256, [4096, 2048, 1024]), (300, 300, [4096, 2048, 1024, 512, 300])]
)
async def test_a_budget_that_nobody_asked_for_is_halved_until_memory_suffices(
    tmp_path: Path, room: int, least: int, tried: list[int]
):
    shard = ShortShard(room)
    found = await start(shard, tmp_path, min_batch_prefill_tokens=least)
    assert shard.warmed == tried
    assert found.max_batch_prefill_tokens == tried[-1]
    assert found.max_total_tokens <= tried[-1], "without chunks a prompt is computed in one prefill"


@pytest.mark.parametrize(
    ("least", "longest", "tried"), [(None, None, [4096]), (1024, None, [4096, 2048, 1024]), (256, 3000, [4096, 3000])]
)
async def test_a_budget_is_lowered_no_further_than_allowed(
    tmp_path: Path, least: int | None, longest: int | None, tried: list[int]
):
    """Never where it was asked for; never below the longest prompt that must be taken in one prefill."""
    shard = ShortShard(500)
    with pytest.raises(StartupError, match=rf"{NOT_ENOUGH_MEMORY} {tried[-1]} prefill tokens"):
        await start(shard, tmp_path, min_batch_prefill_tokens=least, max_input_tokens=longest)
    assert shard.warmed == tried


async def test_other_failures_of_the_warm_up_are_not_tried_again(tmp_path: Path):
    shard = ShortShard(10_000)
    calls: list[str] = []

    def fail(rpc: str, request: object) -> ShardFailure | None:
        calls.append(rpc)
        return ShardFailure("no") if rpc == "Warmup" else None

    shard.failure = fail
    with pytest.raises(StartupError, match="Unable to warmup the Python model shards: Server error: no"):
        await start(shard, tmp_path, min_batch_prefill_tokens=256)
    assert calls.count("Warmup") == 1


async def test_a_budget_that_nobody_asked_for_stays_within_the_cache(tmp_path: Path):
    shard = ShortShard(10_000, holds=3008)
    found = await start(shard, tmp_path, min_batch_prefill_tokens=256)
    assert shard.warmed == [4096, 3008]
    assert found.max_batch_prefill_tokens == 3008
    with pytest.raises(StartupError, match="--max-batch-prefill-tokens must not exceed"):
        await start(ShortShard(10_000, holds=3008), tmp_path)


async def test_the_replicas_of_a_model_share_the_work_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    async def start(config: RouterConfig, metrics: Metrics, **options: Any) -> Any:
        given.append(options["key_work"])
        if len(given) == 3:
            raise BackendError("enough")
        return SimpleNamespace(shards=SimpleNamespace(close=close))

    async def close() -> None:
        given.append("closed")

    monkeypatch.setattr(startup, "connect_and_warm_up", start)
    config = RouterConfig(master_shard_uds_path="0", replica_uds_paths=["1", "2"])
    with pytest.raises(BackendError, match="enough"):
        await connect_replicas(config, Metrics(), max_positions=None, tokenizer_max_length=None)
    assert isinstance(given[0], KeyWork) and given == [given[0]] * 3 + ["closed"] * 2
