"""A real shard process, driven call by call over its socket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import grpc
import pytest
from support.running_server import free_port
from support.shard_process import ShardProcess
from support.tiny_models import tiny_checkpoint
from tokenizers import Tokenizer

from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb
from wire.v3.generate_pb2_grpc import TextGenerationServiceStub

pytestmark = pytest.mark.e2e

MAX_UINT64 = 2**64 - 1
BLOCK = 16
BLOCKS = 6  # of each request


class Caller:
    """Numbers the calls to one shard, as the router does."""

    def __init__(self, stub: TextGenerationServiceStub) -> None:
        self._stub = stub
        self.begin()

    def begin(self) -> None:
        """As a router that has just started."""
        self._numbers = itertools.count()
        self._stub.ClearCache(pb.ClearCacheRequest(sequence=next(self._numbers)), timeout=120)

    def info(self) -> pb.InfoResponse:
        answer: pb.InfoResponse = self._stub.Info(pb.InfoRequest(), timeout=120)
        return answer

    def warm_up(self, folder: Path, **limits: int) -> pb.WarmupResponse:
        request = asked(0, prompt(folder, "_test " * 200)[:200], 20)
        request.parameters.MergeFrom(
            pb.NextTokenChooserParameters(
                temperature=0.9, top_k=10, top_p=0.9, typical_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
                watermark=True,
            )
        )  # fmt: skip
        request.prefill_logprobs = True
        request.top_n_tokens = 20
        message = pb.WarmupRequest(
            batch=pb.Batch(id=0, requests=[request]), max_prefill_tokens=512, sequence=next(self._numbers), **limits
        )
        answer: pb.WarmupResponse = self._stub.Warmup(message, timeout=120)
        return answer

    def prefill(self, batch_id: int, *requests: pb.Request, cached_id: int | None = None) -> pb.PrefillResponse:
        message = pb.PrefillRequest(
            batch=pb.Batch(id=batch_id, requests=requests), cached_id=cached_id, sequence=next(self._numbers)
        )
        answer: pb.PrefillResponse = self._stub.Prefill(message, timeout=120)
        return answer

    def decode(self, *batch_ids: int, new_blocks: Sequence[pb.BlockGrowth] = ()) -> pb.DecodeResponse:
        message = pb.DecodeRequest(batch_ids=batch_ids, new_blocks=new_blocks, sequence=next(self._numbers))
        answer: pb.DecodeResponse = self._stub.Decode(message, timeout=120)
        return answer

    def filter(self, batch_id: int, *request_ids: int) -> pb.FilterBatchResponse:
        message = pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids, sequence=next(self._numbers))
        answer: pb.FilterBatchResponse = self._stub.FilterBatch(message, timeout=120)
        return answer

    def clear(self, batch_id: int) -> None:
        self._stub.ClearCache(pb.ClearCacheRequest(id=batch_id, sequence=next(self._numbers)), timeout=120)

    def run_out(self, batch_id: int, *requests: pb.Request) -> dict[int, list[int]]:
        """All tokens of a batch, by request."""
        response: pb.PrefillResponse | pb.DecodeResponse = self.prefill(batch_id, *requests)
        tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        while True:
            for request_id, ids in tokens_of(response).items():
                tokens[request_id] += ids
            if not response.HasField("batch"):
                return tokens
            response = self.decode(response.batch.id)


def tokens_of(response: pb.PrefillResponse | pb.DecodeResponse) -> dict[int, list[int]]:
    """Of rows with one token each."""
    found = {g.request_id: list(g.tokens.ids) for g in response.generations}
    columns = response.columns
    return found | {request_id: [token] for request_id, token in zip(columns.request_ids, columns.ids, strict=True)}


@lru_cache
def prompt(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def asked(request_id: int, ids: Sequence[int], new_tokens: int, first_block: int = 0) -> pb.Request:
    """As the router writes it; `first_block` 0 leaves blocks to the shard."""
    return pb.Request(
        id=request_id,
        input_ids=ids,
        parameters=pb.NextTokenChooserParameters(
            temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, seed=1
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=new_tokens, ignore_eos_token=True),
        blocks=range(first_block, first_block + BLOCKS) if first_block else (),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardProcess]:
    started = ShardProcess(model, tmp_path_factory.mktemp("socket") / "s")
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def warm(process: ShardProcess, model: Path) -> Caller:
    caller = Caller(process.stub)
    caller.warm_up(model)
    return caller


@pytest.fixture
def shard(warm: Caller) -> Caller:
    warm.begin()
    return warm


@pytest.fixture
def hello(model: Path) -> pb.Request:
    return asked(1, prompt(model, "Hello"), 5, 1)


@pytest.fixture
def day(model: Path) -> pb.Request:
    return asked(2, prompt(model, "Good day"), 5, 7)


@pytest.fixture
def fox(model: Path) -> pb.Request:
    return asked(1, prompt(model, "The quick brown fox jumps over the lazy dog."), 4, 1)


def test_info_and_discovery(process: ShardProcess, shard: Caller) -> None:
    info = shard.info()
    assert (info.protocol, info.dtype, info.device_type) == (PROTOCOL, "torch.float32", "cpu")
    assert (info.support_chunking, info.prefix_caching, info.grows, info.speculate) == (True, True, True, 0)
    assert info.attention_impl in {"paged", "flashdecoding", "flashinfer"}
    assert info.block_size == BLOCK
    urls = process.stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=120).urls
    assert urls == [f"unix://{process.socket}"]


def test_warm_up_echoes_limits_and_can_be_repeated(shard: Caller, model: Path) -> None:
    given = shard.warm_up(model, max_input_tokens=100, max_total_tokens=300)
    assert (given.max_input_tokens, given.max_total_tokens) == (100, 300)
    free = shard.warm_up(model)
    assert free.max_supported_total_tokens >= 16_000 and free.max_supported_total_tokens % BLOCK == 0
    assert free.max_total_tokens == 2048 and free.max_input_tokens == 2047, "the model's positions, not one prefill"


def test_a_text_model_refuses_images(shard: Caller, hello: pb.Request) -> None:
    hello.images.add(key=bytes(32), start=0, length=1)
    (refused,) = shard.prefill(3, hello).generations
    assert refused.error == "request 1: this model takes text only, not images"


def test_one_token_leaves_nothing_cached(shard: Caller, model: Path) -> None:
    response = shard.prefill(3, asked(5, prompt(model, "Hello"), 1, 1))
    (generation,) = response.generations
    assert len(generation.tokens.ids) == 1
    assert generation.generated_text.generated_tokens == 1
    assert generation.generated_text.finish_reason == pb.FINISH_REASON_LENGTH
    assert not response.HasField("batch")
    assert response.forward_ns > 0 and response.total_ns >= response.forward_ns
    assert not shard.decode(3).generations


def test_a_request_that_ends_leaves_its_batch(shard: Caller, model: Path, day: pb.Request) -> None:
    response = shard.prefill(0, asked(1, prompt(model, "Hello"), 1, 1), day)
    assert list(response.batch.request_ids) == [2] == list(response.columns.request_ids)
    kept = shard.filter(0, 2).batch
    assert (kept.id, list(kept.request_ids)) == (0, [2])


def test_merged_batches(shard: Caller, hello: pb.Request, day: pb.Request) -> None:
    alone = shard.run_out(10, hello) | shard.run_out(11, day)
    first, second = shard.prefill(12, hello), shard.prefill(13, day)
    merged = shard.decode(12, 13)
    assert merged.batch.id == 12 and list(merged.batch.request_ids) == [1, 2]
    assert merged.HasField("concat_ns")
    tokens = tokens_of(first) | tokens_of(second)
    assert {i: tokens[i] + ids for i, ids in tokens_of(merged).items()} == {i: ids[:2] for i, ids in alone.items()}
    assert not shard.decode(13).HasField("batch")


def test_a_liveness_probe_changes_nobody(shard: Caller, fox: pb.Request) -> None:
    alone = shard.run_out(1, fox)
    probe = asked(MAX_UINT64, [0], 1)
    probe.blocks.append(0)
    response: pb.PrefillResponse | pb.DecodeResponse = shard.prefill(2, fox)
    tokens = tokens_of(response)[1]
    while response.HasField("batch"):
        assert not shard.prefill(MAX_UINT64, probe).HasField("batch")
        response = shard.decode(2)
        tokens += tokens_of(response)[1]
    assert tokens == alone[1]


def test_errors_answer_internal_and_leave_the_shard_alive(shard: Caller, hello: pb.Request) -> None:
    for call in (shard.decode, lambda: shard.filter(4), lambda: shard.prefill(1)):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert raised.value.details()
    bad = pb.Request()
    bad.CopyFrom(hello)
    del bad.blocks[:]
    bad.blocks.append(2**20)
    assert "outside the cache" in shard.prefill(1, bad).generations[0].error
    assert len(shard.run_out(5, hello)[1]) == 5


def test_prompt_logprobs_and_top_tokens(shard: Caller, fox: pb.Request) -> None:
    fox.prefill_logprobs, fox.top_n_tokens = True, 3
    (generation,) = shard.prefill(1, fox).generations
    found = generation.prefill_tokens
    assert list(found.ids) == list(fox.input_ids) and len(found.ids) == len(found.logprobs) == len(found.texts)
    assert not found.is_special
    assert found.logprobs[0] != found.logprobs[0], "the first token has no logprob"
    assert all(value <= 0 for value in found.logprobs[1:])
    places = generation.prefill_top_tokens
    assert generation.prefill_top_count == 3 and len(places.ids) == len(places.texts) == 3 * (len(found.ids) - 1)
    # A token of the prompt that is the likeliest at its place has one number in both lists.
    likeliest = {i: places.logprobs[3 * i] for i, one in enumerate(found.ids[1:]) if one == places.ids[3 * i]}
    assert likeliest == {i: found.logprobs[i + 1] for i in likeliest}
    (top,) = generation.top_tokens
    assert len(top.ids) >= 3 and list(top.logprobs) == sorted(top.logprobs, reverse=True)


def test_a_prompt_in_chunks(shard: Caller, fox: pb.Request) -> None:
    fox.prefill_logprobs = True
    whole = shard.prefill(1, fox).generations[0].prefill_tokens
    alone = shard.run_out(2, fox)[1]
    fox.chunk_len = 3
    response: pb.PrefillResponse | pb.DecodeResponse = shard.prefill(3, fox)
    assert not (response.generations or response.columns.ids)
    assert response.batch.current_tokens == len(fox.input_ids) - 3, "the next chunk takes the rest"
    response = shard.decode(3)
    (first,) = response.generations
    assert list(first.prefill_tokens.ids) == list(whole.ids)
    assert first.prefill_tokens.logprobs[1:] == pytest.approx(whole.logprobs[1:], abs=1e-4)
    tokens = list(first.tokens.ids)
    while response.HasField("batch"):
        response = shard.decode(3)
        tokens += tokens_of(response)[1]
    assert tokens == alone


def test_a_new_batch_joins_the_running_one(shard: Caller, hello: pb.Request, day: pb.Request) -> None:
    alone = shard.run_out(10, hello) | shard.run_out(11, day)
    day.chunk_len = 1
    first = shard.prefill(12, hello)
    second = shard.prefill(13, day, cached_id=12)
    assert second.batch.id == 12 and list(second.batch.request_ids) == [1, 2]
    assert list(tokens_of(second)) == [1], "the new one has only begun"
    assert second.HasField("concat_ns")
    third = shard.decode(12)
    said = [tokens_of(one) for one in (first, second, third)]
    tokens = {i: [token for one in said for token in one.get(i, [])] for i in (1, 2)}
    assert tokens == {1: alone[1][:3], 2: alone[2][:1]}


def test_a_mixed_call_that_cannot_be_read_loses_the_running_batch(
    shard: Caller, hello: pb.Request, day: pb.Request
) -> None:
    """Its rows have not had their step, and the router has been told that the call failed."""
    shard.prefill(10, hello)
    day.stopping_parameters.max_new_tokens = 0
    with pytest.raises(grpc.RpcError, match="max_new_tokens must be at least 1"):
        shard.prefill(11, day, cached_id=10)
    with pytest.raises(grpc.RpcError, match="Batch ID 10 is gone"):
        shard.decode(10)
    shard.clear(10)
    assert not shard.decode(10).HasField("batch")


def test_a_cached_prefix(shard: Caller, model: Path) -> None:
    ids = prompt(model, "The quick brown fox jumps over the lazy dog. " * 3)[:80]
    alone = shard.run_out(1, asked(1, ids, 4, 1))
    again = asked(1, ids, 4, 7)
    again.blocks[0] = 1
    again.cache_len = BLOCK
    assert shard.run_out(2, again) == alone


def test_blocks_in_place_and_resumption(shard: Caller) -> None:
    """A request that gets its blocks one by one, is preempted in the middle and goes on."""

    def run(request: pb.Request, last: int = 99) -> list[int]:
        blocks = iter(range(20, 30))
        response: pb.PrefillResponse | pb.DecodeResponse = shard.prefill(0, request)
        tokens = tokens_of(response)[4]
        written = len(request.input_ids) + len(request.resume_ids)
        covered = BLOCK * len(request.blocks)
        while response.HasField("batch") and len(tokens) < last:
            new_blocks = []
            if written == covered:
                new_blocks.append(pb.BlockGrowth(request_id=request.id, blocks=[next(blocks)]))
                covered += BLOCK
            written += 1
            response = shard.decode(0, new_blocks=new_blocks)
            tokens += tokens_of(response)[4]
        return tokens

    def request(num_blocks: int) -> pb.Request:
        made = asked(4, range(20, 40), 40, 1)
        del made.blocks[num_blocks:]
        return made

    whole = run(request(6))
    assert len(whole) == 40
    assert run(request(2)) == whole
    for count in (1, 12, 13, 39):
        shard.clear(0)
        first = run(request(2), last=count)
        shard.clear(0)
        again = request(4)
        again.resume_ids.extend(first)
        assert first + run(again) == whole
    refused = request(2)
    refused.input_ids.append(10**6)
    assert "outside the model's" in shard.prefill(0, refused).generations[0].error


def test_a_shard_without_chunking_says_so_refuses_chunks_and_ends_with_its_socket(
    model: Path, tmp_path: Path, hello: pb.Request, day: pb.Request
) -> None:
    process = ShardProcess(model, tmp_path / "s", PREFILL_CHUNKING="0", PREFIX_CACHING="false")
    try:
        process.wait_ready()
        shard = Caller(process.stub)
        info = shard.info()
        assert (info.support_chunking, info.prefix_caching) == (False, False)
        assert shard.warm_up(model).max_total_tokens == 512
        shard.prefill(1, hello)
        with pytest.raises(grpc.RpcError, match="does not chunk"):
            shard.prefill(2, day, cached_id=1)
        shard.clear(1)
        shard.prefill(3, hello)
        day.chunk_len = 1
        assert "does not chunk" in shard.prefill(4, day).generations[0].error
        assert tokens_of(shard.decode(3))
        assert process.stop() == 0
        assert not process.socket.exists()
    finally:
        process.stop()


@pytest.mark.long
def test_two_ranks_share_the_answers(model: Path, tmp_path: Path, shard: Caller) -> None:
    port = free_port()
    ranks = [ShardProcess(model, tmp_path / "s", rank, 2, port) for rank in (0, 1)]
    texts = ["Hello", "Good day", "Bye"]
    requests = [asked(i, prompt(model, text), 6, 1 + BLOCKS * i) for i, text in enumerate(texts)]
    alone = shard.run_out(0, *requests)

    def answers(rank: ShardProcess) -> dict[int, list[int]]:
        rank.wait_ready()
        caller = Caller(rank.stub)
        caller.warm_up(model)
        return caller.run_out(0, *requests)

    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(answers, ranks)
        assert len(ranks[0].stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=120).urls) == 2
    finally:
        for rank in ranks:
            rank.stop()
    assert first == {i: ids if i % 2 == 0 else [] for i, ids in alone.items()}
    assert second == {i: ids if i % 2 == 1 else [] for i, ids in alone.items()}


@pytest.mark.long
def test_a_dead_socket_is_replaced_and_a_live_one_is_not(model: Path, tmp_path: Path) -> None:
    first = ShardProcess(model, tmp_path / "s")
    first.wait_ready()
    first.process.kill()
    first.process.wait(30)
    assert first.socket.exists(), "a killed server leaves its socket"
    second = ShardProcess(model, tmp_path / "s")
    second.wait_ready()
    third = ShardProcess(model, tmp_path / "s")
    assert third.process.wait(60) == 1
    second.stub.Health(pb.HealthRequest(), timeout=120)
    second.stop()
